"""FSDP2 with ZeRO-3 on the same devices: no pipeline, whole microbatches on every device (DIP Table 4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeloom.compare.baseline import SIZES, System
from pipeloom.compare.model_on_cluster import (
    LEVELS,
    Microbatches,
    ModelOnCluster,
    assign_microbatches,
    most_workspace_bytes,
    pack_microbatches,
    resized,
)
from pipeloom.compare.result import BaselineResult
from pipeloom.cost import StrategyCost
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.search import Budget
from pipeloom.spec import Chunk, Layout, ModuleLayout
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph import BACKWARD, FORWARD, NS_PER_S, Edges, IntArray, PairLabel, Pairs, Tasks, make_graph, to_ns
from pipeloom.timeline import Schedule, simulate
from pipeloom.units import to_four_digits

NAME = "FSDP2, ZeRO-3"
Pass = tuple[float, float]
"""Seconds of a module's forward and backward on one microbatch, with overlapped gathers and reductions."""


@dataclass(frozen=True)
class _Whole:
    """A whole model on every device, with sharded weights.

    ``rows`` has the costs under every strategy, by microbatch, module and part.
    """

    layout: Layout
    rows: list[list[list[tuple[StrategyCost, ...]]]]
    static_bytes: int
    free_bytes: int
    """Memory for activations."""


@dataclass(frozen=True)
class _Timed:
    """Seconds of the microbatches of ``whole`` in their order, under one of the strategies `LEVELS`."""

    seconds: float
    level: int
    whole: _Whole


def fsdp_time(setting: ModelOnCluster, microbatches: Microbatches, num_devices: int) -> tuple[float, str]:
    """Return seconds, update included, and memory strategy of FSDP2 with ZeRO-3 on the same devices and data.

    Size and order of microbatches, and strategy, are the fastest of those tried; see `fsdp`. Raise `InfeasibleError` if
    no size of microbatches fits.
    """
    best = _fastest(setting, microbatches, num_devices, num_devices)
    degrees = Degrees(data=num_devices, zero=3, state=setting.degrees.state)
    update_ns = _update_ns(setting, best.whole.layout, degrees)
    return best.seconds + int(update_ns.max()) / NS_PER_S, str(LEVELS[best.level])


def fsdp(setting: ModelOnCluster, _batches: Sequence[Microbatches]) -> System:
    """Make FSDP2 with ZeRO-3 on the devices of one pipeline, each a replica that computes whole microbatches.

    All replicas begin a module's pass together, since they gather its weights together. Microbatches are the given
    ones, or halved until every device has one, or merged. They run in the given order or sorted by time, so that those
    of one step take about as long. Every iteration uses the fastest size, order and strategy that fit.
    """
    devices = setting.degrees.tensor * setting.degrees.pipeline * setting.degrees.context
    degrees = Degrees(data=devices * setting.degrees.data, zero=3, state=setting.degrees.state)

    def run(microbatches: Microbatches, _budget: Budget, _seed: int) -> BaselineResult:
        best = _fastest(setting, microbatches, devices, degrees.num_devices)
        update_ns = _update_ns(setting, best.whole.layout, degrees).repeat(devices)
        return replace(_timeline(setting, best.whole, devices, best.level), update_ns=update_ns)

    modules = setting.model.modules
    chunks = tuple(Chunk(m.name, (0, len(m.flat_layers) - 1), 0) for m in modules)
    return System(NAME, Layout(1, tuple(ModuleLayout.of(m) for m in modules), chunks), run)


def _update_ns(setting: ModelOnCluster, layout: Layout, degrees: Degrees) -> IntArray:
    """Return the time of the update of sharded weights."""
    costs = EmulatedCosts(setting.architecture, setting.cluster, degrees, split=False, trainer=setting.trainer)
    return replace(setting, costs=costs).update_ns(layout)


def _whole(setting: ModelOnCluster, microbatches: Microbatches, costs: EmulatedCosts) -> _Whole:
    modules = setting.model.modules
    wholes = tuple(Chunk(m.name, (0, len(m.flat_layers) - 1), 0) for m in modules)
    layout = Layout(1, tuple(ModuleLayout.of(m) for m in modules), wholes)
    packing = pack_microbatches(setting, layout, microbatches)
    static = costs.static_bytes_together(wholes)
    rows = [
        [[costs.chunk_costs(c, part.workload) for part in parts] for c, parts in zip(wholes, m.parts, strict=True)]
        for m in packing.microbatches
    ]
    free_bytes = setting.capacity_bytes - static - most_workspace_bytes(costs, layout, packing)
    return _Whole(layout, rows, static, free_bytes)


def _fastest(setting: ModelOnCluster, microbatches: Microbatches, num_replicas: int, num_devices: int) -> _Timed:
    """Return the fastest size, order and strategy of microbatches that fit; ``num_devices`` share the weights."""
    degrees = Degrees(data=num_devices, zero=3, state=setting.degrees.state)
    costs = EmulatedCosts(setting.architecture, setting.cluster, degrees, LEVELS, split=False, trainer=setting.trainer)
    wholes = (_whole(setting, tried, costs) for tried in _sizes(setting, microbatches, num_replicas))
    found = [each for whole in wholes for each in _timed(whole, num_replicas)]
    if not found:
        raise InfeasibleError("FSDP: the largest microbatch does not fit on one device")
    return min(found, key=lambda one: (to_four_digits(one.seconds), one.level, one.seconds))


def _sizes(setting: ModelOnCluster, microbatches: Microbatches, num_replicas: int) -> list[Microbatches]:
    """Return the microbatches in all `SIZES`, merged with even work, and halved until every replica has one."""
    tried = [resized(microbatches, size) for size in SIZES]
    for size in SIZES:
        if size > 1:
            merged = assign_microbatches(setting, microbatches, -(-len(microbatches) // size))
            tried.append([[sample for microbatch in group for sample in microbatch] for group in merged])
    halves = tried[SIZES.index(0)]
    while len(halves) < num_replicas and len(again := resized(halves, 0)) > len(halves):
        tried.append(again)
        halves = again
    return tried


def _timed(whole: _Whole, num_replicas: int) -> Iterator[_Timed]:
    """Yield the times under every strategy that fits, in the given order and sorted by time."""
    for level in range(len(LEVELS)):
        if max(sum(_held(column, level) for column in row) for row in whole.rows) > whole.free_bytes:
            continue
        passes = [[_pass(column, level) for column in row] for row in whole.rows]
        given = list(range(len(passes)))
        by_time = sorted(given, key=lambda i: -sum(map(sum, passes[i])))
        for order in (given, by_time):
            ordered = [passes[i] for i in order]
            ordered += [[(0.0, 0.0)] * len(whole.layout.chunks)] * (-len(passes) % num_replicas)
            seconds = fsdp_seconds([ordered[r::num_replicas] for r in range(num_replicas)])
            yield _Timed(seconds, level, replace(whole, rows=[whole.rows[i] for i in order]))


def _held(column: list[tuple[StrategyCost, ...]], level: int) -> int:
    return sum(options[level].activation_bytes for options in column)


def _pass(column: list[tuple[StrategyCost, ...]], level: int) -> tuple[float, float]:
    return sum(o[level].forward_s for o in column), sum(o[level].backward_s for o in column)


def _timeline(setting: ModelOnCluster, whole: _Whole, num_replicas: int, level: int) -> BaselineResult:
    """Make the timeline with one rank per device; a pass begins when all passes of the previous module have ended."""
    tasks: list[tuple[int, int, int, int, int, int]] = []
    """Kind, rank, nanoseconds, pair, microbatch and module of every task."""
    held: list[int] = []
    labels: list[PairLabel] = []
    source: list[int] = []
    target: list[int] = []
    order: list[list[int]] = [[] for _ in range(num_replicas)]
    before: list[int] = []
    numbers = range(len(whole.layout.chunks))
    for first in range(0, len(whole.rows), num_replicas):
        together = whole.rows[first : first + num_replicas]
        pairs: dict[tuple[int, int], int] = {}
        for backward, m in [(False, m) for m in numbers] + [(True, m) for m in reversed(numbers)]:
            now = []
            for device, row in enumerate(together):
                if not row[m]:
                    continue
                if not backward:
                    pairs[device, m] = len(held)
                    held.append(_held(row[m], level))
                    labels.append(PairLabel(m, first + device, 0))
                now.append(len(tasks))
                order[device].append(len(tasks))
                kind, duration = BACKWARD if backward else FORWARD, to_ns(_pass(row[m], level)[backward])
                tasks.append((kind, device, duration, pairs[device, m], first + device, m))
            source += [a for a in before for _ in now]
            target += [b for _ in before for b in now]
            before = now or before
    columns = np.array(tasks, np.int64).reshape(-1, 6).T
    graph = make_graph(
        name=NAME,
        num_ranks=num_replicas,
        tasks=Tasks(
            **dict(zip(("kind", "rank", "duration_ns", "pair", "microbatch", "module"), columns, strict=True)),
            pass_id=np.arange(len(tasks)),
            module_names=tuple(m.name for m in setting.model.modules),
        ),
        pairs=Pairs(activation_bytes=held, weight_gradient_bytes=None, labels=tuple(labels)),
        edges=Edges(source=source, target=target, delay_ns=np.zeros(len(source), np.int64)),
        static_bytes=[whole.static_bytes] * num_replicas,
        capacity_bytes=[whole.free_bytes + whole.static_bytes] * num_replicas,
    )
    schedule = Schedule(tuple(np.array(tasks, np.int64) for tasks in order), None, NAME)
    timeline = simulate(graph, schedule)
    return BaselineResult(NAME, whole.layout, graph, schedule, timeline)


def fsdp_seconds(replicas: Sequence[Sequence[Sequence[Pass]]]) -> float:
    """Return the seconds of an iteration of sharded data parallelism.

    All replicas gather weights together, so no replica begins a module before the slowest one reaches it. The time of a
    step is the sum over modules of the slowest replica's time. ``replicas`` has passes by replica, microbatch and
    module; all have equal numbers of microbatches, of which an empty one is a row of zeros, and of modules. Raise
    `InputError` if there is no replica, or numbers of microbatches differ.
    """
    if not replicas:
        raise InputError("replicas", "is empty", "give at least one")
    if len({len(steps) for steps in replicas}) != 1:
        raise InputError("replicas", "have unequal numbers of microbatches", "pad with empty ones")
    total = 0.0
    for together in zip(*replicas, strict=True):
        for column in zip(*together, strict=True):
            total += max(forward for forward, _ in column) + max(backward for _, backward in column)
    return total
