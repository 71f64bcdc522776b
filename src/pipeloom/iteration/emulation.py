"""Emulate one iteration of a model on a cluster: costs, layout, task graph, order, simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.errors import InfeasibleError
from pipeloom.iteration.microbatches import Draw, Microbatches, pack_microbatches
from pipeloom.iteration.timed import TimedIteration
from pipeloom.layout import ModulePlacement, separate, single_rank
from pipeloom.layout.layouts import typical_seconds
from pipeloom.layout.modality import sub_microbatch_size, typical_lengths
from pipeloom.packing import Packing
from pipeloom.search import Budget, solve
from pipeloom.search.schedules import Order
from pipeloom.spec import Chunk, ChunkStrategy, Layout, Sample
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.catalog import load_architecture, load_cluster
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.parallelism import Degrees
from pipeloom.spec.trainer import FUSED, TrainerSpec
from pipeloom.taskgraph import IntArray, TaskGraph, build_graph, to_ns
from pipeloom.taskgraph.iteration import workspace_bytes
from pipeloom.timeline import Schedule, host_peaks, memory_changes, simulate
from pipeloom.units import size_text

DEFAULT_STRATEGIES = (
    ChunkStrategy("keep"),
    ChunkStrategy("selective"),
    *(ChunkStrategy("recompute", quarters / 4) for quarters in (1, 2, 3, 4)),
)
ORDERS = 30
"""Number of orders that are tried: starts of the planner's search, which then ends."""
IN_FLIGHT = 2
"""Microbatches in flight per rank. 1F1B has one. With two, ranks also work while messages and unequal passes delay the
next microbatch; more save 0.5 % of the time on average over the models of the zoo, and take 10 % more memory."""


@dataclass(frozen=True, eq=False)
class EmulatedStep(TimedIteration):
    """An emulated iteration of one pipeline replica.

    Attributes
    ----------
    layout : Layout
        Layers on each rank.
    strategy : str
        Text of the `ChunkStrategy` of every chunk.
    flops : float
        Operations of the model's matrix products on all devices of the replica.
    num_tokens : int
        Tokens of the last module's sequences in this replica's microbatches.
    num_devices : int
        Devices of this replica.
    peak_flops_per_s : float
        Peak of each device.
    host_bytes : array, shape (num_ranks,)
        Peak host memory of each rank's offloaded activations, per device.
    host_capacity_bytes : int
        Host memory of each device for offloaded activations; 0 if the cluster does not declare its host memory.
    """

    layout: Layout
    strategy: str
    flops: float
    num_tokens: int
    num_devices: int
    peak_flops_per_s: float
    host_bytes: IntArray
    host_capacity_bytes: int

    @property
    def fits(self) -> bool:
        """Whether every rank fits into memory, and its offloaded activations into that of its host."""
        return super().fits and not self.host_excess

    @property
    def host_excess(self) -> str:
        """Text on offloaded activations that exceed the host memory; empty if they fit."""
        most, limit = int(self.host_bytes.max()), self.host_capacity_bytes
        if most <= limit:
            return ""
        share = f"{size_text(limit)} are usable" if limit else "the cluster does not declare host_memory_bytes"
        return f"offloads {size_text(most)} per device to the host, {share}; use another strategy than offload"

    @property
    def mfu(self) -> float:
        """Operations of matrix products over the peak of all devices."""
        return self.flops / (self.num_devices * self.peak_flops_per_s * self.iteration_s)

    @property
    def bubble(self) -> float:
        """Same as ``bubble_share``."""
        return self.bubble_share

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and device of this replica."""
        return self.num_tokens / self.iteration_s / self.num_devices

    @property
    def layers(self) -> tuple[dict[str, tuple[tuple[int, int], ...]], ...]:
        """First and last layer of every chunk of each rank, by module."""
        found: list[dict[str, tuple[tuple[int, int], ...]]] = []
        for rank in range(self.layout.num_ranks):
            here: dict[str, tuple[tuple[int, int], ...]] = {module.name: () for module in self.layout.modules}
            for chunk in self.layout.chunks:
                if chunk.rank == rank:
                    here[chunk.module] += (chunk.layers,)
            found.append(here)
        return tuple(found)


def emulate(
    model: str | Architecture,
    cluster: str | ClusterSpec,
    degrees: Degrees,
    *,
    batch: Draw | Microbatches = Draw(16),
    strategy: ChunkStrategy | str | None = None,
    sub_microbatch: Mapping[str, int] | None = None,
    segments: Mapping[str, int] | None = None,
    trainer: TrainerSpec = FUSED,
) -> EmulatedStep:
    """Emulate one iteration of one pipeline replica.

    Parameters
    ----------
    model, cluster : zoo name, path of a TOML file, or the spec itself
    batch : samples per microbatch, or how to draw them
    strategy : ChunkStrategy, its text, or None
        Strategy of every chunk; None: the fastest that fits.
    sub_microbatch : instances per sub-microbatch by module; default: images by DIP's rule (`image_sizes`)
    segments : chunks per rank by module; default: one
    trainer : framework that runs the model

    Raises
    ------
    InputError
        If the degrees do not fit the model or the cluster, or ``sub_microbatch`` or ``segments`` names an unknown
        module.
    InfeasibleError
        If ``strategy`` is None and no strategy fits in memory.
    """
    architecture = load_architecture(model) if isinstance(model, str) else model
    hardware = load_cluster(cluster) if isinstance(cluster, str) else cluster
    microbatches = batch.of(architecture) if isinstance(batch, Draw) else batch
    costs = EmulatedCosts(
        architecture,
        hardware,
        degrees,
        DEFAULT_STRATEGIES if strategy is None else (strategy,),
        split=False,
        trainer=trainer,
    )
    if sub_microbatch is None:
        sub_microbatch = image_sizes(costs, microbatches)
    layout = even_pipeline(costs, microbatches, sub_microbatch, segments or {})
    return fastest_step(costs, layout, microbatches, or_beyond_memory=strategy is not None)


def image_sizes(costs: EmulatedCosts, microbatches: Microbatches) -> dict[str, int]:
    """Return the images of a sub-microbatch for every module that reads images, by DIP's rule (section 4)."""
    model, base = costs.model_spec, costs.with_strategies(("keep",))
    typical = typical_lengths(model, microbatches)
    return {
        module.name: sub_microbatch_size(base, module.name, len(module.flat_layers), typical[module.name]).chosen
        for module in model.modules
        if module.reads == "images" and typical[module.name]
    }


def instance_tokens(costs: EmulatedCosts) -> Callable[[Sequence[Sample]], int]:
    """Return a function that counts the tokens of a microbatch in all modules."""
    modules = costs.model_spec.modules
    return lambda samples: sum(sum(m.instance_lengths(sample)) for m in modules for sample in samples)


def even_pipeline(
    costs: EmulatedCosts, microbatches: Microbatches, sub_microbatch: Mapping[str, int], segments: Mapping[str, int]
) -> Layout:
    """Divide each module over all ranks (DIP section 4), evenly by time on the microbatch of median size.

    Parameters
    ----------
    costs : EmulatedCosts
        Costs of the model on the cluster.
    microbatches : microbatches
        Microbatches of one replica.
    sub_microbatch : mapping
        Instances per sub-microbatch by module. A missing module is not divided.
    segments : mapping
        Chunks per rank by module. A missing module has one.

    Raises
    ------
    InputError
        If ``sub_microbatch`` or ``segments`` names an unknown module.
    """
    model, base = costs.model_spec, costs.with_strategies(("keep",))
    for name in (*sub_microbatch, *segments):
        model.module(name)
    placements = {
        module.name: ModulePlacement(segments.get(module.name, 1), sub_microbatch.get(module.name))
        for module in model.modules
    }
    single = single_rank(model, placements)
    median = sorted(microbatches, key=instance_tokens(costs))[len(microbatches) // 2]
    seconds = typical_seconds(model, base, [pack_microbatches(model, single, [median])])
    unused = {m.name for m in model.modules if not any(seconds[f"{m.name}/{each.kind}"] for each in m.layers)}
    return separate(
        model,
        costs.placement.degrees.pipeline,
        placements,
        lambda module, layer: 1.0 if module in unused else seconds[f"{module}/{layer.kind}"],
    )


def fastest_step(
    costs: EmulatedCosts,
    layout: Layout,
    microbatches: Microbatches,
    *,
    order: Order | None = None,
    or_beyond_memory: bool = False,
) -> EmulatedStep:
    """Emulate an iteration under the fastest of the costs' strategies that fits in memory.

    Parameters
    ----------
    costs : EmulatedCosts
        Costs under strategies from the fastest to the one with the least memory.
    order : callable or None
        Return the schedule of a graph, for example `one_f_one_b`. None: the fastest of the planner's list schedules.
    or_beyond_memory : bool
        If no strategy fits, emulate the last one nevertheless, with as many microbatches in flight as there are ranks.

    Raises
    ------
    InfeasibleError
        If none fits into the memory of devices and hosts. The message has the lowest peak and the limit.
    """
    packing = pack_microbatches(costs.model_spec, layout, microbatches)
    usable, degrees, ordered = costs.capacity_bytes, costs.placement.degrees, order or _ordered
    graph = build_graph(layout, packing, costs, name=costs.architecture.name, capacity_bytes=usable)
    messages = costs.held_messages(layout)
    chunks = [[c for c in layout.chunks if c.rank == rank] for rank in range(layout.num_ranks)]
    update_ns = np.array([to_ns(costs.update_s(each), "update_s") for each in chunks], np.int64)
    flops = model_flops(costs, layout, packing)

    def timed(number: int, work: IntArray, chosen: TaskGraph, schedule: Schedule) -> EmulatedStep:
        """Return the iteration in this order if all pairs have the same candidate, as in ``chosen``."""
        return EmulatedStep(
            graph=chosen,
            schedule=schedule,
            timeline=simulate(chosen, schedule),
            update_ns=update_ns,
            other_bytes=work,
            capacity_bytes=usable,
            layout=layout,
            strategy=str(costs.strategies[number]),
            flops=flops,
            num_tokens=sum(part.workload.num_tokens for one in packing.microbatches for part in one.parts[-1]),
            num_devices=degrees.pipeline * degrees.tensor * degrees.context,
            peak_flops_per_s=costs.cluster.device.flops_per_s,
            host_bytes=host_peaks(graph, replace(schedule, candidate=np.full(graph.num_pairs, number))),
            host_capacity_bytes=costs.cluster.offload_bytes,
        )

    best: EmulatedStep | None = None
    for number, strategy in enumerate(costs.strategies):
        work = workspace_bytes(layout, packing, costs.with_strategies((strategy,)), messages)[0]
        chosen = graph.with_candidates(None if graph.candidates is None else np.full(graph.num_pairs, number))
        chosen = replace(chosen, capacity_bytes=usable - work)
        if best is not None and _work_ns(chosen) >= best.timeline.makespan_ns:
            continue
        with suppress(InfeasibleError):
            made = timed(number, work, chosen, ordered(chosen))
            if made.fits and (best is None or made.timeline.makespan_ns < best.timeline.makespan_ns):
                best = made
    if best is None:
        more = replace(chosen, capacity_bytes=_needed_bytes(chosen, graph.num_ranks if or_beyond_memory else 1))
        best = timed(number, work, chosen, ordered(more))
        if not or_beyond_memory:
            least = int(best.peak_bytes.max())
            if best.host_excess and least <= usable:
                raise InfeasibleError(best.host_excess)
            raise InfeasibleError(
                f"needs {size_text(least)} on a device at best, {size_text(usable)} are usable; "
                "raise tensor or pipeline parallelism"
            )
    return best


def _ordered(graph: TaskGraph) -> Schedule:
    """Return the fastest of the planner's list schedules that fits, with at most `IN_FLIGHT` microbatches per rank.

    Raises
    ------
    InfeasibleError
        None fits.
    """
    assert graph.capacity_bytes is not None
    if (graph.static_bytes > graph.capacity_bytes).any():
        raise InfeasibleError("weights, gradients and optimizer state do not fit")
    enough = np.minimum(graph.capacity_bytes, _needed_bytes(graph, IN_FLIGHT * graph.num_ranks))
    return solve(replace(graph, capacity_bytes=enough), budget=Budget(evaluations=ORDERS), seed=0).schedule


def _work_ns(graph: TaskGraph) -> int:
    """Return the time of all tasks of the fullest rank, which no order can undercut."""
    return int(np.bincount(graph.rank, weights=graph.duration_ns).max())


def _needed_bytes(graph: TaskGraph, in_flight: int) -> IntArray:
    """Return the memory of each rank for any ``in_flight`` microbatches at once, shape (num_ranks,)."""
    at_start, at_end = memory_changes(graph)
    held = np.zeros((graph.num_ranks, int(graph.microbatch.max()) + 1), np.int64)
    np.add.at(held, (graph.rank, graph.microbatch), at_start + np.maximum(at_end, 0))
    largest: IntArray = np.sort(held, axis=1)[:, ::-1][:, :in_flight].sum(axis=1)
    return graph.static_bytes + largest


def model_flops(costs: EmulatedCosts, layout: Layout, packing: Packing) -> float:
    """Return the operations of an iteration's matrix products on all devices of a replica.

    Gradients to the inputs and to the weights have as many operations as the forward each.
    """
    total = 0.0
    for column, module in enumerate(layout.modules):
        whole = Chunk(module.name, (0, max(c.layers[1] for c in layout.chunks if c.module == module.name)), 0)
        passes = 1 + layout.has_backward(module.name) + (not module.frozen)
        for microbatch in packing.microbatches:
            total += passes * sum(costs.chunk_flops(whole, part.workload) for part in microbatch.parts[column])
    return total


def compile_kernels() -> None:
    """Compile the kernels of the emulator, and those of the search that an emulation calls."""
    emulate("llama3-8b", "h100-8", Degrees(pipeline=2), batch=Draw(2))
