"""From a batch's metadata to a verified plan: the whole per-iteration flow as one function."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from pipeloom import packing, search, tuning
from pipeloom.collector import collector_paused
from pipeloom.cost import Correction, ProfileCosts
from pipeloom.errors import InfeasibleError
from pipeloom.packing import Packing, PackingSpec, packed_batch
from pipeloom.plan import BACKENDS, BackendName, ExecutionPlan, boundary_shapes, lower, verify
from pipeloom.search import SearchParams, Share, StoppingRule, solve, solve_assignable
from pipeloom.search.params import DEFAULTS
from pipeloom.spec import Batch, Layout, ModelSpec
from pipeloom.taskgraph import TaskGraph
from pipeloom.taskgraph.iteration import MemoryLimit, iteration_graph
from pipeloom.timeline import LowerBound, Resolved, Schedule, Timeline, lower_bound, resolve_candidates, simulate
from pipeloom.tuning import TunedPipeline, TuningSpec, tune, tuned_pipeline, tuned_plan

# A measured rate of nothing stands for a link that no message of this size could fill.
_LEAST_S_PER_BYTE = 1e-15


@dataclass(frozen=True)
class Problem:
    """Everything about planning that does not change from batch to batch."""

    model: ModelSpec
    layout: Layout
    costs: ProfileCosts
    packing: PackingSpec
    capacity_bytes: int | None = None
    tuning: TuningSpec | None = None
    """Given: batches are tuned, not searched (PipeTune); the layout must be one of `layout.encoder_first`."""
    pipeline: TunedPipeline | None = None
    """Tables of the uncorrected costs, for tuning; made where left out."""
    backend: BackendName = "gloo"
    """Over which the plans' messages go."""
    search: SearchParams = DEFAULTS
    """What tunes the search of orders."""

    def __post_init__(self) -> None:
        """Tabulate the costs for tuning, once; calibration scales the tables."""
        if self.tuning is not None and self.pipeline is None:
            tokens = self.packing.token_budget
            pipeline = tuned_pipeline(
                self.model,
                self.layout,
                replace(self.costs, factors={}),
                max_tokens=tokens,
                max_length=tokens,
                capacity_bytes=self.capacity_bytes,
            )
            object.__setattr__(self, "pipeline", pipeline)

    @property
    def split_backward(self) -> bool:
        """Whether backwards may be split, a microbatch at a time."""
        return self.costs.split_backward

    def whole_backwards(self) -> Problem:
        """Return the same problem with no choice of splitting, which is faster to plan."""
        return replace(self, costs=replace(self.costs, split_backward=False)) if self.split_backward else self

    def corrected(self, correction: Correction) -> Problem:
        """Return the same problem with costs corrected by what was measured."""
        rank = self.costs.rank
        if correction.link is not None:
            latency_s, s_per_byte = correction.link
            rank = msgspec.structs.replace(
                rank, link_latency_s=latency_s, link_bytes_per_s=1.0 / max(s_per_byte, _LEAST_S_PER_BYTE)
            )
        return replace(self, costs=replace(self.costs, factors=correction.modules, rank=rank))

    def warm_up(self) -> None:
        """Compile the kernels that planning takes; later runs find them compiled."""
        packing.warm_up()
        search.warm_up()
        if any(module.on_ranks == "replicated" for module in self.layout.modules):
            search.warm_up_assignment()
        if self.pipeline is not None:
            tuning.warm_up()


@dataclass(frozen=True)
class PlannedBatch:
    """A plan with all that led to it.

    ``resolved`` is the graph with the chosen strategies alone, whose tasks are the plan's compute actions.
    """

    packing: Packing
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    lower_bound: LowerBound
    plan: ExecutionPlan
    evaluations: int
    resolved: Resolved

    @property
    def gap(self) -> float:
        """Planned time above the lower bound, as a share of the bound."""
        return self.timeline.makespan_ns / max(self.lower_bound.ns, 1) - 1.0


@collector_paused()
def plan_batch(
    problem: Problem, batch: Batch, *, budget: StoppingRule, seed: int, method: str = "default"
) -> PlannedBatch:
    """Pack a batch, search a schedule for it (or tune both together), lower and verify it.

    Parameters
    ----------
    problem : Problem
    batch : Batch
    budget : StoppingRule
        When the search ends.
    seed : int
    method : str
        A search method's name.

    Raises
    ------
    InputError, InfeasibleError, PlanError
        When the batch cannot be packed, scheduled, or (a defect) lowered to a plan that verifies.
    """
    try:
        make = _searched if problem.pipeline is None else _tuned
        made = make(problem, batch, budget, seed, method)
    except InfeasibleError as error:
        if problem.costs.strategies != ("keep",):
            raise
        raise type(error)(f"{error}; offer strategies that hold less, as recompute does") from error
    resolved = resolve_candidates(made.graph, made.schedule.candidate)
    plan = lower(
        resolved.graph,
        resolved.schedule(made.schedule),
        resolved.timeline(made.timeline),
        problem.layout,
        made.packing,
        boundary_shapes(problem.model, problem.layout),
        serial=BACKENDS[problem.backend].serial,
    )
    verify(plan, problem.layout, made.packing, serial=BACKENDS[problem.backend].serial)
    return PlannedBatch(
        made.packing, made.graph, made.schedule, made.timeline, made.lower_bound, plan, made.evaluations, resolved
    )


@dataclass(frozen=True)
class _Made:
    packing: Packing
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    lower_bound: LowerBound
    evaluations: int


def _searched(problem: Problem, batch: Batch, budget: StoppingRule, seed: int, method: str) -> _Made:
    """Pack by policy, then search an order for that packing.

    Where memory is limited, splitting any backward takes room from all: so a half of the budget goes to plans that
    split none, and the faster plan is taken.
    """
    packed = packed_batch(batch, problem.model, problem.layout, problem.costs, problem.packing)
    if not problem.split_backward or problem.capacity_bytes is None:
        return _ordered(problem, packed, budget, seed, method)
    half = Share(budget, 0.5)
    whole = _ordered(problem.whole_backwards(), packed, half, seed, method)
    try:
        split = _ordered(problem, packed, half, seed, method)
    except InfeasibleError:
        return whole
    best = min(whole, split, key=lambda made: made.timeline.makespan_ns)
    bound = min(whole.lower_bound, split.lower_bound, key=lambda bound: bound.ns)
    return replace(best, lower_bound=bound, evaluations=whole.evaluations + split.evaluations)


def _ordered(problem: Problem, packed: Packing, budget: StoppingRule, seed: int, method: str) -> _Made:
    assignable = iteration_graph(
        problem.layout,
        packed,
        problem.costs,
        f"iteration {packed.batch.iteration}",
        MemoryLimit(problem.capacity_bytes),
    )
    best = solve_assignable(assignable, budget=budget, seed=seed, method=method, params=problem.search)
    found = best.solution
    return _Made(packed, best.assignable.graph, found.schedule, found.timeline, found.lower_bound, found.evaluations)


def _tuned(problem: Problem, batch: Batch, budget: StoppingRule, seed: int, method: str) -> _Made:
    """Decide packing, order and encoder pre-computation together, which takes milliseconds.

    Where orders are searched, half of the budget goes to more of that, and half to orders of all tasks of that packing,
    beyond 1F1B; the faster schedule is taken.
    """
    assert problem.pipeline is not None
    assert problem.tuning is not None
    pipeline = problem.pipeline.scaled(problem.costs.factors)
    searches = problem.tuning.order == "search"
    half = Share(budget, 0.5)
    tokens = problem.packing.token_budget
    tuned = tune(pipeline, batch, tokens, problem.tuning, seed, half if searches else None)
    plan = tuned_plan(pipeline, batch, tuned, problem.costs, problem.capacity_bytes)
    timeline = simulate(plan.graph, plan.schedule)
    made = _Made(plan.packing, plan.graph, plan.schedule, timeline, lower_bound(plan.graph), tuned.evaluations)
    if not searches:
        return made
    found = solve(plan.graph, budget=half, seed=seed, method=method, params=problem.search)
    evaluations = made.evaluations + found.evaluations
    if found.timeline.makespan_ns >= timeline.makespan_ns:
        return replace(made, evaluations=evaluations)
    return replace(
        made, schedule=found.schedule, timeline=found.timeline, lower_bound=found.lower_bound, evaluations=evaluations
    )
