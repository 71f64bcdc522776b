"""From a batch's metadata to a verified plan: the whole per-iteration flow as one function."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeloom.collector import collector_paused
from pipeloom.cost import ProfileCosts
from pipeloom.errors import InfeasibleError, NothingFoundError
from pipeloom.packing import Packing
from pipeloom.plan import BACKENDS, ExecutionPlan, boundary_shapes, lower, peak_bytes, verify
from pipeloom.planner.joint import decide, packing_bound
from pipeloom.planner.problem import Problem
from pipeloom.search import Before, Begun, Share, StoppingRule
from pipeloom.spec import Batch
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import LowerBound, Resolved, Schedule, Timeline, gap, resolve_candidates
from pipeloom.units import size_text

_MOST_TRIALS, _TRIAL_SHARE = 12, 0.25
"""Plans made where the first ones need more than there is, and the share of the budget that each has of the last."""


@dataclass(slots=True)
class Finishing:
    """How long lowering and proving take, by the last plan that was made; so much earlier the next search ends.

    Attributes
    ----------
    task_s : float
        Seconds for each task of the graph, of the clock by which the budget is counted. The first plan has a cautious
        guess.
    """

    task_s: float = 4e-5

    def took(self, seconds: float, num_tasks: int) -> None:
        """Note the last plan's seconds; a third more, as no two take equally long and a search ends a little late."""
        self.task_s = 4 / 3 * seconds / num_tasks


@dataclass(frozen=True)
class PlannedBatch:
    """A plan with all that led to it.

    ``resolved`` is the graph with the chosen strategies alone, whose tasks are the plan's compute actions;
    ``peak_bytes`` what each rank needs at most, workspace and messages included, empty where memory is not limited.
    """

    packing: Packing
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    lower_bound: LowerBound
    plan: ExecutionPlan
    evaluations: int
    resolved: Resolved
    peak_bytes: tuple[int, ...] = ()

    @property
    def gap(self) -> float:
        """Planned time above the lower bound, as a share of the bound."""
        return gap(self.timeline.makespan_ns, self.lower_bound.ns)


@collector_paused()
def plan_batch(
    problem: Problem,
    batch: Batch,
    *,
    budget: StoppingRule,
    seed: int,
    method: str = "default",
    finishing: Finishing | None = None,
) -> PlannedBatch:
    """Pack a batch, search a schedule for it (or tune both together), lower and verify it.

    Parameters
    ----------
    problem : Problem
    batch : Batch
    budget : StoppingRule
        Of everything, from the batch to the proved plan: the search ends early enough for that. Evaluations are the
        search's alone. A plan is made however little that is; where the first needs more memory than there is, others
        are made, each in a quarter of the budget of the one before.
    seed : int
    method : str
        A search method's name.
    finishing : Finishing, optional
        What follows the search took last time, and, afterwards, this time: for who plans batch after batch.

    Raises
    ------
    InputError, InfeasibleError, PlanError
        When the batch cannot be packed, scheduled, or (a defect) lowered to a plan that verifies.
    """
    try:
        return _fitting(problem, batch, budget, seed, method, finishing or Finishing())
    except InfeasibleError as error:
        if problem.costs.strategies != ("keep",):
            raise
        raise type(error)(f"{error}; offer strategies that hold less, as recompute does") from error


def _fitting(
    problem: Problem, batch: Batch, budget: StoppingRule, seed: int, method: str, finishing: Finishing
) -> PlannedBatch:
    """Plan until the plan, counted along its actions, needs no more than there is.

    What is put aside is a rule's; a plan's own messages are counted, and what they had no room for is put aside for the
    next. Where no order is found beside that, half of what was added goes back, and other random choices are made: what
    a plan needs differs from order to order.
    """
    spared = last = np.zeros(problem.layout.num_ranks, np.int64)
    failure: InfeasibleError | None = None
    for trial in range(_MOST_TRIALS):
        try:
            planned = _planned(problem.sparing(spared.tolist()), batch, budget, seed + trial, method, finishing)
        except InfeasibleError as error:
            if trial == 0:
                raise
            failure, spared = error, (spared + last) // 2
        else:
            over = np.array([max(0, need - (problem.capacity_bytes or 0)) for need in planned.peak_bytes], np.int64)
            if not over.any():
                if trial:
                    # What was put aside besides is a rule's, and no limit of the packing.
                    planned = replace(planned, lower_bound=packing_bound(problem, planned.packing))
                return planned
            last, spared = spared, spared + over
        budget = Share(budget, _TRIAL_SHARE)
    rank = int(over.argmax())
    more, capacity = size_text(int(over[rank])), size_text(problem.capacity_bytes or 0)
    raise NothingFoundError(
        f"rank {rank}: every plan that was found needs {more} more than the {capacity} that there are; use smaller "
        "microbatches"
    ) from failure


def proved_plan(
    problem: Problem, packing: Packing, graph: TaskGraph, schedule: Schedule, timeline: Timeline
) -> tuple[Resolved, ExecutionPlan]:
    """Lower a schedule of a packing's tasks to a plan, and verify it.

    Returns
    -------
    tuple of Resolved, ExecutionPlan
        The graph with the chosen strategies alone, and its plan.

    Raises
    ------
    PlanError
        When the schedule runs a task before what it waits for.
    """
    resolved = resolve_candidates(graph, schedule.candidate)
    serial = BACKENDS[problem.backend].serial
    plan = lower(
        resolved.graph,
        resolved.schedule(schedule),
        resolved.timeline(timeline),
        problem.layout,
        packing,
        boundary_shapes(problem.model, problem.layout),
        serial=serial,
    )
    verify(plan, problem.layout, packing, serial=serial)
    return resolved, plan


def _planned(
    problem: Problem, batch: Batch, budget: StoppingRule, seed: int, method: str, finishing: Finishing
) -> PlannedBatch:
    """Plan under a limit, and count what the plan needs."""
    watch = Before(budget, finishing.task_s).start()
    made = decide(problem, batch, Begun(watch), seed, method)
    decided_s = watch.now()
    resolved, plan = proved_plan(problem, made.packing, made.graph, made.schedule, made.timeline)
    needs: tuple[int, ...] = ()
    # What is emulated says nothing of single passes.
    if problem.capacity_bytes is not None and isinstance(problem.costs, ProfileCosts):
        needs = peak_bytes(plan, resolved.graph, problem.layout, made.packing, problem.costs)
    if watch.seconds is not None:
        finishing.took(watch.now() - decided_s, made.graph.num_tasks)
    return PlannedBatch(
        made.packing,
        made.graph,
        made.schedule,
        made.timeline,
        made.lower_bound,
        plan,
        made.evaluations,
        resolved,
        needs,
    )
