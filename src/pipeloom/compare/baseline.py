"""Training systems as their users run them, each timed on the same costs, memory and simulator (`dip.txt` §7.1).

A system is prepared once on sampled iterations (its layout), and then times any iteration. Systems that
recompute the same way all along get, for every iteration, the fastest of their settings that fits; this favours
them, since a real run must keep one setting that fits every iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf

from pipeloom.compare.model_on_cluster import (
    Microbatches,
    ModelOnCluster,
    graph_of,
    layer_seconds,
    model_flops,
    pack_microbatches,
    packed_assignable,
    resized,
)
from pipeloom.compare.result import BaselineResult, uniform_recomputation
from pipeloom.cost.dealt import dealt_sum_s
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout import LayerLoad
from pipeloom.layout.choose import LayoutEvaluation, ring_seconds
from pipeloom.search import Evaluations, StoppingRule, solve_assignable
from pipeloom.search.schedules import Order
from pipeloom.spec import Layout
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule

Recompute = Callable[[str, Layout, TaskGraph, Schedule], BaselineResult]
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of parameters in what stages are cut by, where stages of equal time do not fit."""

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


def fixed_system(
    name: str, case: ModelOnCluster, layout: Layout, order: Order, recompute: Recompute = uniform_recomputation
) -> System:
    """A system with one order whatever the data, and recomputation of its own kind."""
    after_s = replica_seconds(case, layout)

    def run(groups: Microbatches, _budget: StoppingRule, _seed: int) -> BaselineResult:
        graph = graph_of(case, layout, groups, name, case.levels)
        return replace(recompute(name, layout, graph, order(graph)), after_s=after_s)

    return System(name, layout, run)


def fixed_systems(name: str, case: ModelOnCluster, layouts: Sequence[Layout], order: Order) -> list[System]:
    return [fixed_system(name, case, layout, order) for layout in distinct(layouts)]


def mfu(case: ModelOnCluster, groups: Microbatches, seconds: float) -> float:
    """Share of all devices' peak that the model's products use in an iteration of ``seconds``, update included."""
    devices = case.degrees.tensor * case.degrees.pipeline * case.degrees.context
    peak = devices * case.cluster.device.flops_per_s
    return model_flops(case, groups) / (peak * (seconds + case.update_s))


def loads_by(case: ModelOnCluster, batches: Sequence[Microbatches], balance: str) -> list[LayerLoad]:
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


def distinct(layouts: Sequence[Layout]) -> list[Layout]:
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
