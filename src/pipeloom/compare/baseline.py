"""Training systems, each timed with the same costs, memory and simulator (DIP §7.1).

A system chooses its layout once on sampled iterations, and then times any iteration. Systems with one recomputation
setting per run get the fastest setting that fits for every iteration. This favors them, since a real run must keep a
setting that fits every iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from pipeloom.compare.model_on_cluster import (
    Microbatches,
    ModelOnCluster,
    graph_of,
    layer_seconds,
    model_flops,
    pack_microbatches,
    packed_assignable,
)
from pipeloom.compare.result import BaselineResult, uniform_recomputation
from pipeloom.cost.encoder_dp import encoder_dp_reduce_s
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout import LayerLoad
from pipeloom.layout.choose import LayoutEvaluation, ring_seconds
from pipeloom.search import Budget, solve_assignable
from pipeloom.search.schedules import Order
from pipeloom.spec import Layout
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule

Balance = Literal["parameters", "time"]
Seconds = Callable[[BaselineResult], float]
Recompute = Callable[[str, Layout, TaskGraph, Schedule], BaselineResult]
_PARAMETER_WEIGHTS = (0.25, 0.5, 0.75, 1.0)
"""Weights of parameters, against time, in balancing stages when stages of equal time do not fit."""

_ONCE = Budget(evaluations=1)
"""Budget of systems that do not search."""
_PRUNING_FACTOR = 1.1
"""Options slower than this multiple of the fastest on the first sampled iteration are not timed on the others."""
SIZES = (1, 0, 2, 4)
"""Numbers of microbatches that are merged into one; 0: each is halved."""


@dataclass(frozen=True, eq=False)
class System:
    """A system with its layout.

    ``run`` times an iteration, given its microbatches, a search budget and a seed. It raises `InfeasibleError` if the
    iteration does not fit even with the most recomputation that the system supports.
    """

    name: str
    layout: Layout
    run: Callable[[Microbatches, Budget, int], BaselineResult]
    tried: tuple[LayoutEvaluation, ...] = ()
    """Evaluations of the candidate layouts, the chosen one first; empty without a choice."""
    packs: bool = False
    """Whether it packs the samples of an iteration into microbatches itself."""
    choice: Choice | None = None
    """What `in_turn` chose it from."""


@dataclass(frozen=True, eq=False)
class Choice:
    """Options of a system and how to choose among them: the arguments of `in_turn`."""

    name: str
    options: tuple[System, ...]
    batches: Sequence[Microbatches]
    last: tuple[System, ...]
    budget: Budget
    seconds: Seconds

    def sorted_by(self, changed: Callable[[System], System]) -> System:
        """Choose again by the times of the options after a change, which the result does not have."""
        before = {changed(option): option for option in self.options}
        order = _fastest_first(list(before), self.batches, self.budget, self.seconds)
        return _first_that_fits(self.name, [*(before[option] for option in order), *self.last])


def by_parameters(_case: ModelOnCluster, _batches: Sequence[Microbatches]) -> LayerLoad:
    """Balance layers by their parameters."""
    return lambda _module, layer: float(max(1, layer.num_parameters))


def by_time(setting: ModelOnCluster, batches: Sequence[Microbatches], encoder_dp: Collection[str] = ()) -> LayerLoad:
    """Balance layers by mean time on the sampled iterations; ``encoder_dp`` modules use encoder data parallelism."""
    seconds = layer_seconds(setting, batches, encoder_dp=encoder_dp)
    return lambda module, layer: seconds[f"{module}/{layer.kind}"]


def searched_system(
    name: str, setting: ModelOnCluster, layout: Layout, method: str = "default", *, threads: int = 1
) -> System:
    """Make a system that searches order and strategies for every iteration."""

    def run(microbatches: Microbatches, budget: Budget, seed: int) -> BaselineResult:
        packing = pack_microbatches(setting, layout, microbatches)
        assignable = packed_assignable(setting, layout, packing, name)
        assigned = solve_assignable(assignable, budget=budget, seed=seed, method=method, threads=threads)
        solution = assigned.solution
        return BaselineResult(
            name,
            layout,
            assigned.assignable.graph,
            solution.schedule,
            solution.timeline,
            solution.lower_bound,
            replica_seconds(setting, layout),
            packing,
        )

    return System(name, layout, run)


def replica_seconds(setting: ModelOnCluster, layout: Layout) -> float:
    """Return the seconds after the last backward that only this layout needs.

    These are the gradient reduction of replicated modules and of modules with encoder data parallelism, and the weight
    update of the latter, whose weights are not divided.
    """
    gradient_bytes = setting.degrees.state.gradient
    shared = {m.name: 1 if m.name in layout.encoder_dp_modules else setting.degrees.tensor for m in layout.modules}
    num_bytes = {
        m.name: sum(layer.num_parameters for layer in m.flat_layers) * gradient_bytes // shared[m.name]
        for m in setting.model.modules
    }
    inside_s = encoder_dp_reduce_s(
        layout, setting.model, setting.costs, lambda layer: layer.num_parameters * gradient_bytes
    )
    return ring_seconds(layout, num_bytes, setting.costs) + inside_s + _encoder_dp_update_s(setting, layout)


def _encoder_dp_update_s(setting: ModelOnCluster, layout: Layout) -> float:
    """Return the additional update time of modules with encoder data parallelism, on the rank with most of them."""
    if not layout.encoder_dp_modules or setting.degrees.tensor == 1 or not setting.update:
        return 0.0
    of_ranks = (
        [c for c in layout.chunks if c.rank == r and c.module in layout.encoder_dp_modules]
        for r in range(layout.num_ranks)
    )
    whole = setting.costs.undivided
    return max(whole.update_s(chunks) - setting.costs.update_s(chunks) if chunks else 0.0 for chunks in of_ranks)


def fixed_system(
    name: str, setting: ModelOnCluster, layout: Layout, order: Order, recompute: Recompute = uniform_recomputation
) -> System:
    """Make a system with one order for all data, and its own kind of recomputation."""
    after_s = replica_seconds(setting, layout)

    def run(microbatches: Microbatches, _budget: Budget, _seed: int) -> BaselineResult:
        graph = graph_of(setting, layout, microbatches, name, setting.levels)
        return replace(recompute(name, layout, graph, order(graph)), after_s=after_s)

    return System(name, layout, run)


def fixed_systems(name: str, setting: ModelOnCluster, layouts: Sequence[Layout], order: Order) -> list[System]:
    """Make one `fixed_system` per distinct layout."""
    return [fixed_system(name, setting, layout, order) for layout in distinct(layouts)]


def mfu(setting: ModelOnCluster, microbatches: Microbatches, seconds: float) -> float:
    """Return the model FLOPs utilization of an iteration of ``seconds``, update included."""
    devices = setting.degrees.tensor * setting.degrees.pipeline * setting.degrees.context
    peak = devices * setting.cluster.device.flops_per_s
    return model_flops(setting, microbatches) / (peak * seconds)


def loads_by(setting: ModelOnCluster, batches: Sequence[Microbatches], balance: Balance) -> list[LayerLoad]:
    """Return the load by parameters, or those of `loads_by_time`."""
    if balance == "parameters":
        return [by_parameters(setting, batches)]
    if balance != "time":
        raise InputError("balance", f"{balance!r} is unknown", "use parameters or time")
    return loads_by_time(setting, batches)


def loads_by_time(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> list[LayerLoad]:
    """Return the load by time, then mixtures with more weight on parameters, since stages of equal time may not fit."""
    layers = [(m.name, layer) for m in setting.model.modules for layer in m.flat_layers]
    time, size = by_time(setting, batches), by_parameters(setting, batches)
    all_time, all_size = (sum(load(*layer) for layer in layers) or 1.0 for load in (time, size))

    def mixed(share: float) -> LayerLoad:
        return lambda module, layer: (
            (1 - share) * time(module, layer) / all_time + share * size(module, layer) / all_size
        )

    return [time, *(mixed(share) for share in _PARAMETER_WEIGHTS)]


def distinct(layouts: Sequence[Layout]) -> list[Layout]:
    return list({layout.chunks: layout for layout in layouts}.values())


def in_turn(
    name: str,
    options: Sequence[System],
    batches: Sequence[Microbatches],
    last: Sequence[System] = (),
    budget: Budget = _ONCE,
    *,
    seconds: Seconds,
) -> System:
    """Make a system of several options, sorted by their mean time on the sampled iterations.

    Options that are much slower on the first iteration are not timed on the others. Options under which more sampled
    iterations fit come first. An iteration that does not fit under the first option runs under the next one; those of
    ``last`` come last. ``budget`` is the search budget of every sampled iteration. ``seconds`` returns the time of a
    result, such as `ModelOnCluster.iteration_s`, which includes the updates of weights.
    """
    choice = Choice(name, tuple(options), batches, tuple(last), budget, seconds)
    return replace(choice.sorted_by(lambda option: option), choice=choice)


def _first_that_fits(name: str, order: Sequence[System]) -> System:
    """Make a system that runs every iteration under the first of its options that fits."""

    def run(microbatches: Microbatches, budget: Budget, seed: int) -> BaselineResult:
        problem: InfeasibleError | None = None
        for option in order:
            try:
                return option.run(microbatches, budget, seed)
            except InfeasibleError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    return System(name, order[0].layout, run)


def _fastest_first(
    options: Sequence[System], batches: Sequence[Microbatches], budget: Budget, seconds: Seconds
) -> list[System]:
    """Sort options; time those close to the fastest on the first iteration, or that do not fit it, on all."""
    if len(options) == 1:
        return list(options)
    found = {option: _seconds(option, batches[:1], budget, seconds) for option in options}
    limit = _PRUNING_FACTOR * min(min(each, default=inf) for each in found.values())
    close = {option for option, each in found.items() if min(each, default=inf) <= limit or inf in each}
    for option in close:
        found[option] += _seconds(option, batches, budget, seconds, first=1)

    def key(option: System) -> tuple[int, bool, float]:
        lacking, mean_s = _standing(found[option])
        return lacking, option not in close, mean_s

    return sorted(options, key=key)


def standing(option: System, batches: Sequence[Microbatches], *, seconds: Seconds) -> tuple[int, float]:
    """Return the number of sampled iterations that do not fit, and the mean seconds of the others."""
    return _standing(_seconds(option, batches, _ONCE, seconds))


def _standing(seconds: Sequence[float]) -> tuple[int, float]:
    fitting = [each for each in seconds if each < inf]
    return len(seconds) - len(fitting), sum(fitting) / max(1, len(fitting))


def _seconds(
    option: System, batches: Sequence[Microbatches], budget: Budget, seconds: Seconds, first: int = 0
) -> list[float]:
    """Return the seconds of the sampled iterations from ``first`` on; infinite if one does not fit."""
    found = []
    for seed in range(first, len(batches)):
        try:
            found.append(seconds(option.run(batches[seed], budget, seed)))
        except InfeasibleError:
            found.append(inf)
    return found
