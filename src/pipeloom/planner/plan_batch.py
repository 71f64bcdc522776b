"""From a batch's metadata to a verified plan: the whole per-iteration flow as one function."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from pipeloom import packing, search, tuning
from pipeloom.cost import Correction, CostModel, ProfileCosts
from pipeloom.packing import Packing, PackingSpec, cost_loads, pack
from pipeloom.plan import BACKENDS, BackendName, ExecutionPlan, boundary_shapes, lower, verify
from pipeloom.search import Share, StoppingRule, solve
from pipeloom.spec import Batch, Layout, ModelSpec
from pipeloom.taskgraph import TaskGraph, build_graph
from pipeloom.timeline import LowerBound, Schedule, Timeline, lower_bound, simulate
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
    """Given: batches are tuned, not searched (PipeTune); the layout must be one of `arrange.encoder_first`."""
    pipeline: TunedPipeline | None = None
    """Tables of the uncorrected costs, for tuning; made where left out."""
    backend: BackendName = "gloo"
    """Over which the plans' messages go."""

    def __post_init__(self) -> None:
        """Tabulate the costs for tuning, once; calibration scales the tables."""
        if self.tuning is not None and self.pipeline is None:
            tokens = self.packing.token_budget
            pipeline = tuned_pipeline(
                self.model, self.layout, replace(self.costs, factors={}), max_tokens=tokens, max_length=tokens,
                capacity_bytes=self.capacity_bytes,
            )  # fmt: skip
            object.__setattr__(self, "pipeline", pipeline)

    def corrected(self, correction: Correction) -> Problem:
        """Return the same problem with costs corrected by what was measured."""
        cluster = self.costs.cluster
        if correction.link is not None:
            latency_s, s_per_byte = correction.link
            cluster = msgspec.structs.replace(
                cluster, link_latency_s=latency_s, link_bytes_per_s=1.0 / max(s_per_byte, _LEAST_S_PER_BYTE)
            )
        return replace(self, costs=replace(self.costs, factors=correction.modules, cluster=cluster))

    def warm_up(self) -> None:
        """Compile the kernels that planning takes; later runs find them compiled."""
        packing.warm_up()
        search.warm_up()
        if self.pipeline is not None:
            tuning.warm_up()


@dataclass(frozen=True)
class PlannedBatch:
    """A plan with all that led to it."""

    packing: Packing
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    lower_bound: LowerBound
    plan: ExecutionPlan
    evaluations: int

    @property
    def gap(self) -> float:
        """Planned time above the lower bound, as a share of the bound."""
        return self.timeline.makespan_ns / max(self.lower_bound.ns, 1) - 1.0


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
    made = (
        _searched(problem, batch, budget, seed, method)
        if problem.pipeline is None
        else _tuned(problem, batch, budget, seed, method)
    )
    plan = lower(
        made.graph,
        made.schedule,
        made.timeline,
        problem.layout,
        made.packing,
        boundary_shapes(problem.model, problem.layout),
        batch.iteration,
        # Where every pair has but one strategy, the graph has no candidates, and the plan must still name it.
        default_strategy=problem.costs.strategies[0],
        serial=BACKENDS[problem.backend].serial,
    )
    verify(plan, problem.layout, made.packing, serial=BACKENDS[problem.backend].serial)
    return PlannedBatch(
        made.packing, made.graph, made.schedule, made.timeline, made.lower_bound, plan, made.evaluations
    )


def packed_batch(
    batch: Batch, model: ModelSpec, layout: Layout, costs: CostModel, packing: PackingSpec
) -> Packing:
    """Pack a batch by its policy, as it is packed for training under this layout."""
    by_load = not packing.policy.startswith("first_fit")
    loads = cost_loads(batch, model, layout, costs) if by_load else None
    return pack(batch, model, layout, packing, loads)


@dataclass(frozen=True)
class _Made:
    packing: Packing
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    lower_bound: LowerBound
    evaluations: int


def _searched(problem: Problem, batch: Batch, budget: StoppingRule, seed: int, method: str) -> _Made:
    """Pack by policy, then search an order for that packing."""
    packed = packed_batch(batch, problem.model, problem.layout, problem.costs, problem.packing)
    graph = build_graph(
        problem.layout, packed, problem.costs, name=f"iteration {batch.iteration}",
        capacity_bytes=problem.capacity_bytes,
    )  # fmt: skip
    found = solve(graph, budget=budget, seed=seed, method=method)
    return _Made(packed, graph, found.schedule, found.timeline, found.lower_bound, found.evaluations)


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
    made = _Made(
        plan.packing, plan.graph, plan.schedule, timeline, lower_bound(plan.graph), tuned.evaluations
    )
    if not searches:
        return made
    found = solve(plan.graph, budget=half, seed=seed, method=method)
    evaluations = made.evaluations + found.evaluations
    if found.timeline.makespan_ns >= timeline.makespan_ns:
        return replace(made, evaluations=evaluations)
    return replace(
        made,
        schedule=found.schedule,
        timeline=found.timeline,
        lower_bound=found.lower_bound,
        evaluations=evaluations,
    )
