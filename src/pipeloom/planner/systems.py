"""Training systems as their users run them, each timed on the same costs, memory and simulator (`dip.txt` §7.1).

A system is prepared once on sampled iterations (its layout), and then times any iteration. Systems that
recompute the same way all along get, for every iteration, the fastest of their settings that fits; this favours
them, since a real run must keep one setting that fits every iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from pipeloom.arrange import LayerLoad, ModulePlacement, chain, even_layout, modality_placements, separate
from pipeloom.baselines import (
    best_stages,
    interleaved_one_f_one_b,
    one_f_one_b,
    zero_bubble_h1,
)
from pipeloom.cost import CostModel
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.emulator.static import GRADIENT_BYTES
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.planner.case import (
    LEVELS,
    Case,
    Groups,
    dealable_of,
    graph_of,
    layer_seconds,
    model_flops,
    pack_groups,
    typical_lengths,
    workspace_bytes,
)  # fmt: skip
from pipeloom.planner.compare import SystemTimeline
from pipeloom.planner.layout_trial import LayoutTrial
from pipeloom.planner.recomputation import (
    level_tables,
    per_rank_recomputation,
    uniform_recomputation,
)  # fmt: skip
from pipeloom.search import Evaluations, StoppingRule, levels_by_time, solve, solve_dealt, uniform_start
from pipeloom.spec import Chunk, LayerSpec, Layout, ModuleLayout
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule, lower_bound, simulate

Order = Callable[[TaskGraph], Schedule]
Recompute = Callable[[str, Layout, TaskGraph, Schedule], SystemTimeline]
MOST_CHUNKS = 4
"""Chunks per rank that are tried for interleaved schedules."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of parameters in what stages are cut by, where stages of equal time do not fit."""


@dataclass(frozen=True, eq=False)
class System:
    """A system that has its layout.

    ``run`` times an iteration: the samples of every microbatch, how long to search, a seed. It raises
    `InfeasibleError` where the iteration does not fit, with the most recomputation that the system has.
    """

    name: str
    layout: Layout
    run: Callable[[Groups, StoppingRule, int], SystemTimeline]
    tried: tuple[LayoutTrial, ...] = ()
    """Layouts that it was chosen among, the chosen one first; where there was a choice."""


def by_parameters(_case: Case, _batches: Sequence[Groups]) -> LayerLoad:
    """Balance layers by their parameters."""
    return lambda _module, layer: float(max(1, layer.num_parameters))


def by_time(case: Case, batches: Sequence[Groups]) -> LayerLoad:
    """Balance layers by their mean time on the sampled iterations."""
    seconds = layer_seconds(case, batches)
    return lambda module, layer: seconds[f"{module}/{layer.kind}"]


def by_count(_module: str, layer: LayerSpec) -> float:
    """Balance the number of blocks, as the papers' ``L / (P K)``; embeddings, adapters and heads hardly count."""
    return 1.0 if layer.kind.startswith("block") else 0.01


def megatron_1f1b(case: Case, batches: Sequence[Groups], balance: str = "parameters") -> System:
    """Megatron-LM's 1F1B: one chain of stages.

    Where stages of equal time do not fit, it cuts partly by parameters, or as nnScaler does with one setting of
    recomputation for all.
    """
    name = f"1F1B by {balance}"
    layouts = [chain(case.model, case.num_ranks, 1, load) for load in _loads(case, batches, balance)]
    if balance == "time":
        with suppress(InfeasibleError):
            layouts.append(static_stages(case, batches, alike=True)[0])
    return in_turn(name, [fixed_system(name, case, one, one_f_one_b) for one in _distinct(layouts)], batches)


def megatron_interleaved(case: Case, batches: Sequence[Groups], balance: str = "parameters") -> System:
    """Megatron-LM's interleaved 1F1B, with the number of chunks that is best on the sampled iterations."""
    name = f"interleaved by {balance}"
    counts = [
        v
        for v in range(2, MOST_CHUNKS + 1)
        if case.num_ranks * v <= sum(len(m.flat_layers) for m in case.model.modules)
    ] or [1]
    loads = _loads(case, batches, balance)
    layouts = [chain(case.model, case.num_ranks, v, load) for load in loads for v in counts]
    return in_turn(
        name,
        [fixed_system(name, case, one, interleaved_one_f_one_b) for one in _distinct(layouts)],
        batches,
    )


def zero_bubble(case: Case, batches: Sequence[Groups], balance: str = "time") -> System:
    """Zero-bubble H1: 1F1B's chain of stages with split backwards, weight gradients filling the idle time.

    Recomputed activations wait for the weight gradients, so these come as late as memory allows, whichever number
    of microbatches behind is best for the iteration. Every rank recomputes as little as fits.
    """
    costs = EmulatedCosts(case.architecture, case.machine, case.degrees, LEVELS)

    def system(layout: Layout) -> System:
        def run(groups: Groups, _budget: StoppingRule, _seed: int) -> SystemTimeline:
            graph = graph_of(case, layout, groups, "zero-bubble H1", costs, split_backward=True)
            fastest = np.full(case.num_ranks, levels_by_time(graph)[0])
            best: SystemTimeline | None = None
            for behind in range(case.num_ranks):
                with suppress(InfeasibleError):
                    order = zero_bubble_h1(graph, behind)
                    found = per_rank_recomputation("zero-bubble H1", layout, graph, order, fastest)
                    if best is None or found.timeline.makespan_ns < best.timeline.makespan_ns:
                        best = found
            if best is None:
                raise InfeasibleError("zero-bubble H1: does not fit even with full recomputation")
            return best

        return System("zero-bubble H1", layout, run)

    layouts = [chain(case.model, case.num_ranks, 1, load) for load in _loads(case, batches, balance)]
    return in_turn("zero-bubble H1", [system(layout) for layout in _distinct(layouts)], batches)


def nnscaler(case: Case, batches: Sequence[Groups]) -> System:
    """nnScaler*: the best static stages and recomputation for the mean microbatch, run by 1F1B."""
    layout, levels = static_stages(case, batches)

    def run(groups: Groups, _budget: StoppingRule, _seed: int) -> SystemTimeline:
        graph = graph_of(case, layout, groups, "nnScaler*", case.levels)
        return per_rank_recomputation("nnScaler*", layout, graph, one_f_one_b(graph), np.array(levels))

    return System("nnScaler*", layout, run)


def static_stages(
    case: Case, batches: Sequence[Groups], *, alike: bool = False
) -> tuple[Layout, tuple[int, ...]]:
    """The best stages for 1F1B on the mean microbatch that fit, and the setting of recomputation of each.

    Parameters
    ----------
    alike : bool
        All stages have one setting.

    Raises
    ------
    InfeasibleError
        No cut fits.
    """
    layers = [(m.name, i, layer) for m in case.model.modules for i, layer in enumerate(m.flat_layers)]
    seconds, held = level_tables(case, batches)
    kept = np.array([case.levels.static_bytes(Chunk(module, (i, i), 0)) for module, i, _ in layers], float)
    plain = chain(case.model, case.num_ranks, 1, by_parameters(case, batches))
    room = case.capacity_bytes - workspace_bytes(case.levels, plain, pack_groups(case, plain, batches[0]))
    found: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = []
    for rows in [[level] for level in range(len(seconds))] if alike else [list(range(len(seconds)))]:
        with suppress(InfeasibleError):
            stages = best_stages(seconds[rows], held[rows], kept, case.num_ranks, room)
            found.append((stages.slowest_s, stages.cuts, tuple(rows[level] for level in stages.levels)))
    if not found:
        raise InfeasibleError(f"no cut into {case.num_ranks} stages fits {room} bytes on the mean microbatch")
    _, cuts, levels = min(found)
    chunks: list[Chunk] = []
    for rank in range(case.num_ranks):
        here = layers[cuts[rank] : cuts[rank + 1]]
        for name in dict.fromkeys(module for module, _, _ in here):
            numbers = [i for module, i, _ in here if module == name]
            chunks.append(Chunk(name, (numbers[0], numbers[-1]), rank))
    modules = tuple(ModuleLayout(m.name, m.after, m.frozen) for m in case.model.modules)
    return Layout(case.num_ranks, modules, tuple(chunks)), levels


def partitioned(case: Case, batches: Sequence[Groups]) -> System:
    """DIP's layout under Megatron-LM's interleaved order (the first step of `dip.txt` Table 5)."""
    return fixed_system(
        "modality-aware, static order", case, dip_layout(case, batches), interleaved_one_f_one_b
    )


def dip_layout(case: Case, batches: Sequence[Groups]) -> Layout:
    """DIP's layout as published: sizes and segments by its rules, equal numbers of layers."""
    places = _placements_by_rule(case, batches)
    return separate(case.model, case.num_ranks, places, by_count)


def our_layout(case: Case, batches: Sequence[Groups]) -> Layout:
    """The paper's sizes and segments, with layers dealt so that all ranks have equal time."""
    places = _placements_by_rule(case, batches)
    return even_layout(case.model, case.num_ranks, places, by_time(case, batches))


def _placements_by_rule(case: Case, batches: Sequence[Groups]) -> dict[str, ModulePlacement]:
    typical = typical_lengths(case.model, [group for groups in batches for group in groups])
    return modality_placements(case.model, case.costs, case.num_ranks, typical)


def searched_system(
    name: str, case: Case, layout: Layout, method: str = "default", costs: EmulatedCosts | None = None,
    threads: int = 1,
) -> System:  # fmt: skip
    """A system that searches order and strategies for every iteration."""

    def run(groups: Groups, budget: StoppingRule, seed: int) -> SystemTimeline:
        made = dealable_of(case, layout, groups, name, costs)
        dealt = solve_dealt(made, budget=budget, seed=seed, method=method, threads=threads)
        found = dealt.solution
        return SystemTimeline(
            name,
            layout,
            dealt.dealable.graph,
            found.schedule,
            found.timeline,
            found.lower_bound,
            replica_seconds(case, layout),
        )

    return System(name, layout, run)


def replica_seconds(case: Case, layout: Layout) -> float:
    """Seconds to add up the gradients of replicated modules over the pipeline, after the last backward."""
    num_bytes = {
        m.name: sum(layer.num_parameters for layer in m.flat_layers) * GRADIENT_BYTES // case.degrees.tensor
        for m in case.model.modules
    }
    return ring_seconds(layout, num_bytes, case.costs)


def ring_seconds(layout: Layout, gradient_bytes: Mapping[str, int], costs: CostModel) -> float:
    """Seconds in which a ring of all pipeline ranks adds up the gradients of replicated modules.

    Parameters
    ----------
    gradient_bytes : mapping
        Of every module, on one rank.
    """
    total = sum(gradient_bytes[m.name] for m in layout.modules if m.on_ranks == "replicated" and not m.frozen)
    if not total or layout.num_ranks == 1:
        return 0.0
    return 2 * (layout.num_ranks - 1) * costs.transfer_s(total // layout.num_ranks)


def unadaptive_system(name: str, case: Case, layout: Layout, method: str, threads: int = 1) -> System:
    """A system that searches orders only, under one setting of recomputation for all.

    The setting is the one under which first in, first out is fastest.
    """

    def run(groups: Groups, budget: StoppingRule, seed: int) -> SystemTimeline:
        graph = graph_of(case, layout, groups, name, case.levels)
        schedule = uniform_start(graph)
        if schedule is None:
            raise InfeasibleError(f"{name}: no setting of recomputation fits")
        choice = schedule.candidate
        if method != "first in, first out":
            single = graph.with_candidates(choice)
            schedule = solve(single, budget=budget, seed=seed, method=method, threads=threads).schedule
        chosen = Schedule(schedule.order, choice, name)
        return SystemTimeline(name, layout, graph, chosen, simulate(graph, chosen), lower_bound(graph))

    return System(name, layout, run)


def fixed_system(
    name: str, case: Case, layout: Layout, order: Order, recompute: Recompute = uniform_recomputation
) -> System:
    """A system with one order whatever the data, and recomputation of its own kind."""

    def run(groups: Groups, _budget: StoppingRule, _seed: int) -> SystemTimeline:
        graph = graph_of(case, layout, groups, name, case.levels)
        return recompute(name, layout, graph, order(graph))

    return System(name, layout, run)


def mfu(case: Case, groups: Groups, seconds: float) -> float:
    """Share of all devices' peak that the model's products use in an iteration of ``seconds``, update included."""
    devices = case.degrees.tensor * case.degrees.pipeline * case.degrees.context
    peak = devices * case.machine.device.flops_per_s
    return model_flops(case, groups) / (peak * (seconds + case.update_s))


def _loads(case: Case, batches: Sequence[Groups], balance: str) -> list[LayerLoad]:
    """By parameters; or by time and, since stages of equal time may not fit, nearer and nearer to by parameters."""
    if balance == "parameters":
        return [by_parameters(case, batches)]
    if balance != "time":
        raise InputError("balance", f"{balance!r} is none of parameters, time")
    layers = [(m.name, layer) for m in case.model.modules for layer in m.flat_layers]
    time, size = by_time(case, batches), by_parameters(case, batches)
    all_time, all_size = (sum(load(*layer) for layer in layers) or 1.0 for load in (time, size))

    def mixed(share: float) -> LayerLoad:
        return lambda module, layer: (
            (1 - share) * time(module, layer) / all_time + share * size(module, layer) / all_size
        )

    return [time, *(mixed(share) for share in SHARES)]


def _distinct(layouts: Sequence[Layout]) -> list[Layout]:
    return list({layout.chunks: layout for layout in layouts}.values())


def in_turn(name: str, options: Sequence[System], batches: Sequence[Groups]) -> System:
    """A system of several layouts: the one that is fastest on the first sampled iteration.

    An iteration that does not fit it runs under the next that it fits.
    """
    order = list(options)
    if len(options) > 1:
        seconds = []
        for option in options:
            try:
                seconds.append(option.run(batches[0], Evaluations(1), 0).iteration_s)
            except InfeasibleError:
                seconds.append(float("inf"))
        order = [option for _, option in sorted(zip(seconds, options, strict=True), key=lambda each: each[0])]

    def run(groups: Groups, budget: StoppingRule, seed: int) -> SystemTimeline:
        problem: InfeasibleError | None = None
        for option in order:
            try:
                return option.run(groups, budget, seed)
            except InfeasibleError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    return System(name, order[0].layout, run)
