"""The current run as a system, and the same trainer with tuned settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from pipeloom.compare.baseline import System, in_turn, loads_by_time
from pipeloom.compare.model_on_cluster import (
    LEVELS,
    Microbatches,
    ModelOnCluster,
    num_experts,
    pack_microbatches,
    packed_assignable,
)
from pipeloom.compare.result import BaselineResult, first_setting
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout import encoders_in_first_stage, layout_of_stages
from pipeloom.limits import MAX_TOTAL
from pipeloom.search import Budget, check_group_size, group_sizes, uniform_settings
from pipeloom.search.schedules import SCHEDULES, Order, ScheduleSettings
from pipeloom.spec import ChunkStrategy, Layout
from pipeloom.spec.current_run import ONE_STAGE, CurrentRun
from pipeloom.taskgraph import TaskGraph

NOW, NOW_TITLE = "now", "Your setup"
TUNED, TUNED_TITLE = "now-tuned", "Your trainer with other settings"
MOST_CHUNKS = 8
"""Most stages per rank that are tried when tuning a trainer."""


def now_system(setting: ModelOnCluster, run: CurrentRun) -> System:
    """Make the system of the current run, which is timed even if it exceeds the emulated memory: it runs in reality.

    Raise `InputError` if the layout does not match the model, or the number of experts is not divisible by ``ep``.
    """
    experts = num_experts(setting.architecture)
    if experts % run.ep:
        has = f"has {experts} experts a layer" if experts > 1 else "has no experts"
        raise InputError("ep", f"{run.ep}, {setting.model.name} {has}", "give a divisor, or leave it out")
    if run.layout:
        layout = layout_of_stages(setting.model, setting.num_ranks, run.layout)
    else:
        layout = encoders_in_first_stage(setting.model, setting.num_ranks, run.num_chunks, counted=False)
    return _timed_as(run, NOW_TITLE, setting, layout, anyway=True)


def check_groups(run: CurrentRun, num_microbatches: int) -> None:
    """Raise `InputError` for groups of microbatches that Megatron's interleaved schedule rejects.

    A run of torchtitan has PyTorch's schedule, which takes other numbers.
    """
    if run.order == "interleaved" and run.num_chunks > 1 and not _pytorch(run):
        check_group_size("group", run.group or run.pp, run.pp, num_microbatches)


def megatron_group(run: CurrentRun, num_microbatches: int) -> int | None:
    """Return the group size of Megatron's interleaved schedule if it is not the number of ranks, else None."""
    size = next(iter(group_sizes(run.pp, num_microbatches)), run.pp)
    return None if size == run.pp or _pytorch(run) else size


def _pytorch(run: CurrentRun) -> bool:
    return run.source.endswith("of torchtitan")


def tuned_system(setting: ModelOnCluster, run: CurrentRun, batches: Sequence[Microbatches]) -> System:
    """Make the same trainer with the last module's layers balanced by time and the least recomputation that fits.

    Encoders remain in the first stage. 1F1B may become interleaved or vice versa, with the number of stages per rank
    that is fastest on the sampled iterations.
    """
    several = run.order in ("1f1b", "interleaved")
    most = (
        min(MOST_CHUNKS, len(setting.model.modules[-1].flat_layers) // setting.num_ranks) if several else run.num_chunks
    )
    if several and run.only == "1f1b":
        most = 1
    least = min(most, 2 if run.only == "interleaved" else 1) if several else most
    systems: dict[object, System] = {}
    for chunks in range(least, most + 1):
        schedule = ("interleaved" if chunks > 1 else "1f1b") if several else run.order
        same = msgspec.structs.replace(run, schedule=schedule, chunks=chunks, group=None, layout=(), recompute=None)
        for load in loads_by_time(setting, batches):
            layout = encoders_in_first_stage(setting.model, setting.num_ranks, chunks, load)
            systems.setdefault(layout.chunks, _timed_as(same, TUNED_TITLE, setting, layout))
    return in_turn(TUNED_TITLE, list(systems.values()), batches, seconds=setting.iteration_s)


def _timed_as(run: CurrentRun, name: str, setting: ModelOnCluster, layout: Layout, *, anyway: bool = False) -> System:
    costs = run_costs(setting, run)

    def time(microbatches: Microbatches, _budget: Budget, _seed: int) -> BaselineResult:
        packing = pack_microbatches(setting, layout, microbatches)
        try:
            graph = packed_assignable(setting, layout, packing, setting.model.name, costs).graph
            return under_static_order(name, run, layout, graph, or_recomputing=not anyway)
        except InfeasibleError:
            if not anyway:
                raise
        # Nothing reaches this limit. With None, the graph would not count the memory of streams.
        unlimited = replace(setting, capacity_bytes=MAX_TOTAL)
        graph = packed_assignable(unlimited, layout, packing, setting.model.name, costs).graph
        return replace(under_static_order(name, run, layout, graph), over_limit=True)

    return System(name, layout, time)


def run_costs(setting: ModelOnCluster, run: CurrentRun) -> EmulatedCosts:
    """Return costs with the run's memory strategy first, then Megatron-LM's strategies that its trainer accepts."""
    own = () if run.strategy is None else (run.strategy,)
    strategies = (*own, *(level for level in LEVELS if level not in own and level.first not in run.rejected))
    split = SCHEDULES[run.order].splits_backward
    return EmulatedCosts(
        setting.architecture, setting.cluster, setting.degrees, strategies, split=split, trainer=setting.trainer
    )


def under_static_order(
    name: str, run: CurrentRun, layout: Layout, graph: TaskGraph, *, or_recomputing: bool = True
) -> BaselineResult:
    """Time a run's schedule on a graph with `run_costs` and the run's memory strategy; take its fastest form.

    ``or_recomputing``: if the run's own strategy does not fit, use the fastest one that fits. Raise `InfeasibleError`
    if no strategy fits.
    """
    settings = uniform_settings(graph)
    if run.strategy is not None:
        settings = [0, *settings] if or_recomputing else [0]
    orders = [make(graph) for make in static_orders(run, layout)]
    return first_setting(name, layout, graph, orders, settings)


def static_orders(run: CurrentRun, layout: Layout) -> list[Order]:
    """Return the forms of a run's schedule, interleaved if ranks have several stages."""
    ranks = [chunk.rank for chunk in layout.chunks]
    stages = [rank for i, rank in enumerate(ranks) if i == 0 or ranks[i - 1] != rank]
    several = len(set(stages)) < len(stages)
    name = "interleaved" if several and run.order in ONE_STAGE else run.order
    return SCHEDULES[name].orders(layout.num_ranks, ScheduleSettings(run.group, as_megatron=not _pytorch(run)))


def held_as(costs: EmulatedCosts, result: BaselineResult) -> ChunkStrategy:
    """Return the memory strategy of a result of `under_static_order`."""
    if result.schedule.candidate is None or not len(result.schedule.candidate):
        return costs.strategies[0]
    return costs.strategies[int(result.schedule.candidate[0])]
