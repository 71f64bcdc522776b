"""From a batch's metadata to a verified plan: the whole per-iteration flow as one function."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.collector import collector_paused
from pipeloom.errors import InfeasibleError
from pipeloom.packing import Packing
from pipeloom.plan import BACKENDS, ExecutionPlan, boundary_shapes, lower, verify
from pipeloom.planner.joint import decide
from pipeloom.planner.problem import Problem
from pipeloom.search import StoppingRule
from pipeloom.spec import Batch
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import LowerBound, Resolved, Schedule, Timeline, resolve_candidates


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
        made = decide(problem, batch, budget, seed, method)
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
