"""Training systems as their users run them, each timed on the same costs, memory and simulator (`dip.txt` §7.1).

A system is prepared once on sampled iterations (its layout), and then times any iteration. Systems that
recompute the same way all along get, for every iteration, the fastest of their settings that fits; this favours
them, since a real run must keep one setting that fits every iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from pipeloom.cost.dealt import dealt_sum_s
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.explain.compare import BaselineResult, uniform_recomputation
from pipeloom.lab.baselines import best_stages, zero_bubble_h1
from pipeloom.lab.solvers import uniform_start
from pipeloom.lab.systems.model_on_cluster import (
    LEVELS,
    Microbatches,
    ModelOnCluster,
    graph_of,
    layer_seconds,
    model_flops,
    most_workspace_bytes,
    pack_microbatches,
    packed_assignable,
    resized,
)
from pipeloom.lab.systems.recomputation import level_tables, per_rank_recomputation
from pipeloom.layout import (
    LayerLoad,
    ModulePlacement,
    by_count,
    chain_of_stages,
    even_layout,
    modality_placements,
    separate,
)
from pipeloom.layout.choose import LayoutEvaluation, ring_seconds
from pipeloom.layout.layouts import chunk_counts
from pipeloom.layout.modality import typical_lengths
from pipeloom.search import (
    Evaluations,
    StoppingRule,
    interleaved_as_megatron,
    interleaved_one_f_one_b,
    one_f_one_b,
    solve,
    solve_assignable,
    uniform_settings,
)
from pipeloom.spec import Chunk, Layout, ModuleLayout
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule, lower_bound, simulate
from pipeloom.units import size_text

Order = Callable[[TaskGraph], Schedule]
Recompute = Callable[[str, Layout, TaskGraph, Schedule], BaselineResult]
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of parameters in what stages are cut by, where stages of equal time do not fit."""
ROOMS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
"""Shares of memory that static stages are also planned for, to leave room for microbatches larger than the mean."""

_ONCE = Evaluations(1)
"""For systems that do not search."""
NEAR = 1.1
"""Times the fastest on the first sampled iteration, up to which options are timed on the others."""
SIZES = (1, 0, 2, 4)
"""Microbatches that may become one, 0: each becomes two."""


@dataclass(frozen=True, eq=False)
class System:
    """A system that has its layout.

    ``run`` times an iteration: the samples of every microbatch, how long to search, a seed. It raises
    `InfeasibleError` where the iteration does not fit, with the most recomputation that the system has.
    """

    name: str
    layout: Layout
    run: Callable[[Microbatches, StoppingRule, int], BaselineResult]
    tried: tuple[LayoutEvaluation, ...] = ()
    """Layouts that it was chosen among, the chosen one first; where there was a choice."""
    packs: bool = False
    """Whether it chooses itself how the samples of an iteration become microbatches."""


def by_parameters(_case: ModelOnCluster, _batches: Sequence[Microbatches]) -> LayerLoad:
    """Balance layers by their parameters."""
    return lambda _module, layer: float(max(1, layer.num_parameters))


def by_time(case: ModelOnCluster, batches: Sequence[Microbatches], dealt: Collection[str] = ()) -> LayerLoad:
    """Balance layers by their mean time on the sampled iterations, where instances of some modules are dealt."""
    seconds = layer_seconds(case, batches, dealt=dealt)
    return lambda module, layer: seconds[f"{module}/{layer.kind}"]


def megatron_1f1b(case: ModelOnCluster, batches: Sequence[Microbatches], balance: str = "parameters") -> System:
    """Megatron-LM's 1F1B: one chain of stages.

    Where stages of equal time do not fit, it cuts partly by parameters, or as nnScaler does with one setting of
    recomputation for all; where those of equal parameters do not, as nnScaler does.
    """
    name = f"1F1B by {balance}"
    layouts = [chain_of_stages(case.model, case.num_ranks, 1, load) for load in _loads(case, batches, balance)]
    fitting = stages_that_fit(case, batches)
    if balance == "time":
        layouts += fitting
    return in_turn(name, _fixed(name, case, layouts, one_f_one_b), batches, _fixed(name, case, fitting, one_f_one_b))


def stages_that_fit(case: ModelOnCluster, batches: Sequence[Microbatches]) -> list[Layout]:
    """The best stages with one setting of recomputation for all, in all memory and in less and less; what there is."""
    found = []
    for share in (1.0, *ROOMS) if batches else ():
        with suppress(InfeasibleError):
            found.append(static_stages(case, batches, alike=True, room_share=share)[0])
    return found


def _fixed(name: str, case: ModelOnCluster, layouts: Sequence[Layout], order: Order) -> list[System]:
    return [fixed_system(name, case, layout, order) for layout in _distinct(layouts)]


def megatron_interleaved(case: ModelOnCluster, batches: Sequence[Microbatches], balance: str = "parameters") -> System:
    """Megatron-LM's interleaved 1F1B, with the number of chunks that is best on the sampled iterations.

    Every number from two up to as many as there are layers for is tried, with every cut: the time of an iteration jumps
    from one number to the next, where stages divide evenly or less has to be recomputed, so no few of them stand for
    the rest. Groups of microbatches are the smallest that Megatron takes. An iteration that fits none of these runs by
    1F1B, which holds less.
    """
    name = f"interleaved by {balance}"
    counts = chunk_counts(case.num_ranks, case.model.modules)[1:] or [1]
    loads = _loads(case, batches, balance)
    layouts = [chain_of_stages(case.model, case.num_ranks, v, load) for load in loads for v in counts]
    whole = [chain_of_stages(case.model, case.num_ranks, 1, load) for load in loads] + stages_that_fit(case, batches)
    options = _fixed(name, case, layouts, interleaved_as_megatron)
    return in_turn(name, options, batches, _fixed(name, case, whole, one_f_one_b))


def zero_bubble(case: ModelOnCluster, batches: Sequence[Microbatches], balance: str = "time") -> System:
    """Zero-bubble H1: 1F1B's chain of stages with split backwards, weight gradients filling the idle time.

    Recomputed activations wait for the weight gradients, so these come as late as memory allows, whichever number
    of microbatches behind is best for the iteration. Every rank recomputes as little as fits. An iteration that does
    not fit so runs by 1F1B with whole backwards.
    """
    costs = EmulatedCosts(case.architecture, case.cluster, case.degrees, LEVELS)

    def system(layout: Layout) -> System:
        def run(groups: Microbatches, _budget: StoppingRule, _seed: int) -> BaselineResult:
            graph = graph_of(case, layout, groups, "zero-bubble H1", costs)
            fastest = np.full(case.num_ranks, uniform_settings(graph)[0])
            best: BaselineResult | None = None
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

    layouts = [chain_of_stages(case.model, case.num_ranks, 1, load) for load in _loads(case, batches, balance)]
    whole = _fixed("zero-bubble H1", case, [*layouts, *stages_that_fit(case, batches)], one_f_one_b)
    return in_turn("zero-bubble H1", [system(layout) for layout in _distinct(layouts)], batches, whole)


def nnscaler(case: ModelOnCluster, batches: Sequence[Microbatches]) -> System:
    """nnScaler*: the best static stages and recomputation for the mean microbatch, run by 1F1B.

    Stages made for the mean may leave too little memory for an iteration of large microbatches, so others are made for
    less memory, to be taken where the first do not fit; and at last stages of equal parameters.
    """

    def system(layout: Layout, levels: tuple[int, ...]) -> System:
        def run(groups: Microbatches, _budget: StoppingRule, _seed: int) -> BaselineResult:
            graph = graph_of(case, layout, groups, "nnScaler*", case.levels)
            return per_rank_recomputation("nnScaler*", layout, graph, one_f_one_b(graph), np.array(levels))

        return System("nnScaler*", layout, run)

    planned = [static_stages(case, batches)]
    for share in ROOMS:
        with suppress(InfeasibleError):
            planned.append(static_stages(case, batches, room_share=share))
    even = chain_of_stages(case.model, case.num_ranks, 1, by_parameters(case, batches))
    last = _fixed("nnScaler*", case, [even], one_f_one_b)
    return in_turn("nnScaler*", [system(*one) for one in dict.fromkeys(planned)], batches, last)


def static_stages(
    case: ModelOnCluster, batches: Sequence[Microbatches], *, alike: bool = False, room_share: float = 1.0
) -> tuple[Layout, tuple[int, ...]]:
    """The best stages for 1F1B on the mean microbatch that fit, and the setting of recomputation of each.

    Parameters
    ----------
    alike : bool
        All stages have one setting.
    room_share : float
        Of the devices' memory, to plan with.

    Raises
    ------
    InfeasibleError
        No cut fits.
    """
    layers = [(m.name, i, layer) for m in case.model.modules for i, layer in enumerate(m.flat_layers)]
    seconds, held = level_tables(case, batches)
    kept = np.array([case.levels.static_bytes(Chunk(module, (i, i), 0)) for module, i, _ in layers], float)
    plain = chain_of_stages(case.model, case.num_ranks, 1, by_parameters(case, batches))
    need = most_workspace_bytes(case.levels, plain, pack_microbatches(case, plain, batches[0]))
    room = int(room_share * case.capacity_bytes) - need
    found: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = []
    for rows in [[level] for level in range(len(seconds))] if alike else [list(range(len(seconds)))]:
        with suppress(InfeasibleError):
            stages = best_stages(seconds[rows], held[rows], kept, case.num_ranks, room)
            found.append((stages.slowest_s, stages.cuts, tuple(rows[level] for level in stages.levels)))
    if not found:
        raise InfeasibleError(f"no cut into {case.num_ranks} stages fits {size_text(int(room))} on the mean microbatch")
    _, cuts, levels = min(found)
    chunks: list[Chunk] = []
    for rank in range(case.num_ranks):
        here = layers[cuts[rank] : cuts[rank + 1]]
        for name in dict.fromkeys(module for module, _, _ in here):
            numbers = [i for module, i, _ in here if module == name]
            chunks.append(Chunk(name, (numbers[0], numbers[-1]), rank))
    modules = tuple(ModuleLayout.of(m) for m in case.model.modules)
    return Layout(case.num_ranks, modules, tuple(chunks)), levels


def partitioned(case: ModelOnCluster, batches: Sequence[Microbatches]) -> System:
    """DIP's layout under Megatron-LM's interleaved order (the first step of `dip.txt` Table 5)."""
    return fixed_system("modality-aware, static order", case, dip_layout(case, batches), interleaved_one_f_one_b)


def dip_layout(case: ModelOnCluster, batches: Sequence[Microbatches]) -> Layout:
    """DIP's layout as published: sizes and segments by its rules, equal numbers of layers."""
    places = _placements_by_rule(case, batches)
    return separate(case.model, case.num_ranks, places, by_count)


def our_layout(case: ModelOnCluster, batches: Sequence[Microbatches]) -> Layout:
    """The paper's sizes and segments, with layers dealt so that all ranks have equal time."""
    places = _placements_by_rule(case, batches)
    return even_layout(case.model, case.num_ranks, places, by_time(case, batches))


def _placements_by_rule(case: ModelOnCluster, batches: Sequence[Microbatches]) -> dict[str, ModulePlacement]:
    typical = typical_lengths(case.model, [group for groups in batches for group in groups])
    return modality_placements(case.model, case.costs, case.num_ranks, typical)


def searched_system(
    name: str,
    case: ModelOnCluster,
    layout: Layout,
    method: str = "default",
    costs: EmulatedCosts | None = None,
    threads: int = 1,
) -> System:
    """A system that searches order and strategies for every iteration."""

    def run(groups: Microbatches, budget: StoppingRule, seed: int) -> BaselineResult:
        packing = pack_microbatches(case, layout, groups)
        made = packed_assignable(case, layout, packing, name, costs)
        found_for = solve_assignable(made, budget=budget, seed=seed, method=method, threads=threads)
        found = found_for.solution
        return BaselineResult(
            name,
            layout,
            found_for.assignable.graph,
            found.schedule,
            found.timeline,
            found.lower_bound,
            replica_seconds(case, layout),
            packing,
        )

    return System(name, layout, run)


def replica_seconds(case: ModelOnCluster, layout: Layout) -> float:
    """Seconds after the last backward that other layouts do not have.

    Adding up gradients of modules that are replicated or dealt, and updating weights of dealt ones, which are whole.
    """
    gradient_bytes = case.degrees.state.gradient
    shared = {m.name: 1 if m.name in layout.dealt else case.degrees.tensor for m in layout.modules}
    num_bytes = {
        m.name: sum(layer.num_parameters for layer in m.flat_layers) * gradient_bytes // shared[m.name]
        for m in case.model.modules
    }
    inside_s = dealt_sum_s(layout, case.model, case.costs, lambda layer: layer.num_parameters * gradient_bytes)
    return ring_seconds(layout, num_bytes, case.costs) + inside_s + _dealt_update_s(case, layout)


def _dealt_update_s(case: ModelOnCluster, layout: Layout) -> float:
    """Seconds that the update of dealt modules takes beyond that of divided ones, on the rank with most of them."""
    if not layout.dealt or case.degrees.tensor == 1 or not case.update_s:
        return 0.0
    of_ranks = ([c for c in layout.chunks if c.rank == r and c.module in layout.dealt] for r in range(layout.num_ranks))
    whole = case.costs.undivided
    return max(whole.update_s(chunks) - case.costs.update_s(chunks) if chunks else 0.0 for chunks in of_ranks)


def unadaptive_system(name: str, case: ModelOnCluster, layout: Layout, method: str, threads: int = 1) -> System:
    """A system that searches orders only, under one setting of recomputation for all.

    The setting is the one under which first in, first out is fastest.
    """

    def run(groups: Microbatches, budget: StoppingRule, seed: int) -> BaselineResult:
        graph = graph_of(case, layout, groups, name, case.levels)
        schedule = uniform_start(graph)
        if schedule is None:
            raise InfeasibleError(f"{name}: no setting of recomputation fits")
        choice = schedule.candidate
        if method != "first in, first out":
            single = graph.with_candidates(choice)
            schedule = solve(single, budget=budget, seed=seed, method=method, threads=threads).schedule
        chosen = Schedule(schedule.order, choice, name)
        return BaselineResult(name, layout, graph, chosen, simulate(graph, chosen), lower_bound(graph))

    return System(name, layout, run)


def fixed_system(
    name: str, case: ModelOnCluster, layout: Layout, order: Order, recompute: Recompute = uniform_recomputation
) -> System:
    """A system with one order whatever the data, and recomputation of its own kind."""
    after_s = replica_seconds(case, layout)

    def run(groups: Microbatches, _budget: StoppingRule, _seed: int) -> BaselineResult:
        graph = graph_of(case, layout, groups, name, case.levels)
        return replace(recompute(name, layout, graph, order(graph)), after_s=after_s)

    return System(name, layout, run)


def mfu(case: ModelOnCluster, groups: Microbatches, seconds: float) -> float:
    """Share of all devices' peak that the model's products use in an iteration of ``seconds``, update included."""
    devices = case.degrees.tensor * case.degrees.pipeline * case.degrees.context
    peak = devices * case.cluster.device.flops_per_s
    return model_flops(case, groups) / (peak * (seconds + case.update_s))


def _loads(case: ModelOnCluster, batches: Sequence[Microbatches], balance: str) -> list[LayerLoad]:
    """By parameters; or by time, as `loads_by_time`."""
    if balance == "parameters":
        return [by_parameters(case, batches)]
    if balance != "time":
        raise InputError("balance", f"{balance!r} is none of parameters, time")
    return loads_by_time(case, batches)


def loads_by_time(case: ModelOnCluster, batches: Sequence[Microbatches]) -> list[LayerLoad]:
    """Balance by time, then nearer and nearer to by parameters, since stages of equal time may not fit."""
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


def in_turn(
    name: str,
    options: Sequence[System],
    batches: Sequence[Microbatches],
    last: Sequence[System] = (),
    budget: StoppingRule = _ONCE,
) -> System:
    """A system of several layouts: the one that is fastest on the sampled iterations, by the mean of all.

    Those that are far behind on the first are not timed on the others. A layout that some sampled iteration does not
    fit comes after those that fit more of them. A later iteration that
    does not fit the first layout runs under the next that it fits; those of ``last`` come after all others. ``budget``
    is of every sampled iteration, for systems that search.
    """
    order = [*(options if len(options) == 1 else _fastest_first(options, batches, budget)), *last]

    def run(groups: Microbatches, budget: StoppingRule, seed: int) -> BaselineResult:
        problem: InfeasibleError | None = None
        for option in order:
            try:
                return option.run(groups, budget, seed)
            except InfeasibleError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    return System(name, order[0].layout, run)


def _fastest_first(options: Sequence[System], batches: Sequence[Microbatches], budget: StoppingRule) -> list[System]:
    """Those that come near on the first sampled iteration, or do not fit it, by all; the others by it alone."""
    found = {option: _seconds(option, batches[:1], budget) for option in options}
    far = NEAR * min(min(each, default=inf) for each in found.values())
    near = {option for option, each in found.items() if min(each, default=inf) <= far or inf in each}
    for option in near:
        found[option] += _seconds(option, batches, budget, first=1)

    def key(option: System) -> tuple[int, bool, float]:
        lacking, seconds = _standing(found[option])
        return lacking, option not in near, seconds

    return sorted(options, key=key)


def sized(system: System, size: int) -> System:
    """The same system with so many of the given microbatches as one, see `SIZES`."""
    return replace(system, run=lambda groups, budget, seed: system.run(resized(groups, size), budget, seed))


def any_size(system: System) -> System:
    """The same system with every iteration's microbatches halved, as they are, or so many together: the fastest.

    One that makes its microbatches itself has had the choice.
    """
    if system.packs:
        return system

    def run(groups: Microbatches, budget: StoppingRule, seed: int) -> BaselineResult:
        found, problem = list[BaselineResult](), None
        for size in SIZES:
            try:
                found.append(sized(system, size).run(groups, budget, seed))
            except InfeasibleError as error:
                problem = problem or error
        if not found:
            assert problem is not None
            raise problem
        return min(found, key=lambda one: one.iteration_s)

    return replace(system, run=run)


def standing(option: System, batches: Sequence[Microbatches], budget: StoppingRule = _ONCE) -> tuple[int, float]:
    """How many sampled iterations do not fit, and the mean seconds of the others."""
    return _standing(_seconds(option, batches, budget))


def _standing(seconds: Sequence[float]) -> tuple[int, float]:
    fitting = [each for each in seconds if each < inf]
    return len(seconds) - len(fitting), sum(fitting) / max(1, len(fitting))


def _seconds(option: System, batches: Sequence[Microbatches], budget: StoppingRule, first: int = 0) -> list[float]:
    """Of the sampled iterations from the first on; infinite where one does not fit."""
    found = []
    for seed in range(first, len(batches)):
        try:
            found.append(option.run(batches[seed], budget, seed).iteration_s)
        except InfeasibleError:
            found.append(inf)
    return found
