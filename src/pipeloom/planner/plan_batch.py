"""From a batch's metadata to a verified plan: the whole per-iteration flow as one function."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from pipeloom.cost import Correction, ProfileCosts
from pipeloom.packing import Packing, PackingSpec, pack
from pipeloom.plan import ExecutionPlan, boundary_shapes, lower, verify
from pipeloom.search import StoppingRule, solve
from pipeloom.spec import Batch, Layout, ModelSpec
from pipeloom.taskgraph import TaskGraph, build_graph
from pipeloom.timeline import LowerBound, Schedule, Timeline

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

    def corrected(self, correction: Correction) -> Problem:
        """Return the same problem with costs corrected by what was measured."""
        cluster = self.costs.cluster
        if correction.link is not None:
            latency_s, s_per_byte = correction.link
            cluster = msgspec.structs.replace(
                cluster, link_latency_s=latency_s, link_bytes_per_s=1.0 / max(s_per_byte, _LEAST_S_PER_BYTE)
            )
        return replace(self, costs=replace(self.costs, factors=correction.modules, cluster=cluster))


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
    """Pack a batch, search a schedule for it, lower and verify it.

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
    packing = pack(batch, problem.model, problem.layout, problem.packing)
    graph = build_graph(
        problem.layout, packing, problem.costs, name=f"iteration {batch.iteration}",
        capacity_bytes=problem.capacity_bytes,
    )  # fmt: skip
    solution = solve(graph, budget=budget, seed=seed, method=method)
    plan = lower(
        graph,
        solution.schedule,
        solution.timeline,
        problem.layout,
        packing,
        boundary_shapes(problem.model, problem.layout),
        batch.iteration,
        # Where every pair has but one strategy, the graph has no candidates, and the plan must still name it.
        default_strategy=problem.costs.strategies[0],
    )
    verify(plan, problem.layout, packing)
    return PlannedBatch(
        packing, graph, solution.schedule, solution.timeline, solution.lower_bound, plan, solution.evaluations
    )
