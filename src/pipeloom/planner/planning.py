"""The planning of one batch: from its metadata to a verified plan."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from pipeloom.collector import collector_paused
from pipeloom.cost import ProfileCosts
from pipeloom.errors import InfeasibleError, NothingFoundError
from pipeloom.packing import Packing
from pipeloom.plan import BACKENDS, ExecutionPlan, boundary_shapes, lower, peak_bytes, verify
from pipeloom.planner.joint import PackingResult, decide, packing_bound
from pipeloom.planner.problem import PlanningProblem
from pipeloom.search import Budget
from pipeloom.spec import Batch
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Resolved, Schedule, Timeline, gap, resolve_candidates
from pipeloom.units import size_text

_MOST_TRIALS, _TRIAL_SHARE = 12, 0.25
"""Maximum number of plans if they exceed the memory limit, and the budget of each as a share of the previous budget."""


@dataclass(slots=True)
class FinishingTime:
    """Time of lowering and verification, measured on the last plan. The next search ends earlier by this time.

    Attributes
    ----------
    task_s : float
        Seconds for each task of the graph, by the clock of the budget. The initial value is a cautious estimate.
    """

    task_s: float = 4e-5

    def took(self, seconds: float, num_tasks: int) -> None:
        """Record the seconds of the last plan, plus a third because times vary and a search may end late."""
        self.task_s = 4 / 3 * seconds / num_tasks


@dataclass(frozen=True)
class PlannedBatch(PackingResult):
    """A packing with its schedule, and the plan that was made of it.

    ``resolved`` is the graph with only the chosen strategies. Its tasks are the compute actions of the plan.
    ``peak_bytes`` is the peak memory of each rank, including workspace and messages. It is empty if memory is not
    limited.
    """

    _: KW_ONLY
    plan: ExecutionPlan
    resolved: Resolved
    peak_bytes: tuple[int, ...] = ()

    @property
    def gap(self) -> float:
        """Planned time above the lower bound, as a share of the bound."""
        return gap(self.timeline.makespan_ns, self.lower_bound.ns)


@collector_paused()
def plan_batch(
    problem: PlanningProblem, batch: Batch, *, budget: Budget | None = None, finishing: FinishingTime | None = None
) -> PlannedBatch:
    """Pack a batch, search a schedule for it (or tune both together), lower it and verify it.

    Parameters
    ----------
    problem : PlanningProblem
        The model with its layout and costs, and the settings of planning.
    batch : Batch
        Metadata of the samples.
    budget : Budget, optional
        Budget of all steps from the batch to the verified plan. Search ends early enough for the other steps. A number
        of evaluations covers only the search. The smallest budget still yields a plan. If a plan exceeds the memory
        limit, another one is made in a quarter of the previous budget. Default: ``problem.budget_s`` seconds.
    finishing : FinishingTime, optional
        Measured time of the steps after the search. It is updated, so pass the same object for successive batches.

    Raises
    ------
    InputError, InfeasibleError, PlanError
        If the batch cannot be packed, scheduled, or (a defect) lowered to a plan that verifies.
    """
    try:
        budget = budget or Budget(seconds=problem.budget_s)
        return _plan_within_memory(problem, batch, budget, finishing or FinishingTime())
    except InfeasibleError as error:
        if problem.costs.strategies != ("keep",):
            raise
        raise type(error)(f"{error}; offer strategies that hold less, such as recompute") from error


def _plan_within_memory(
    problem: PlanningProblem, batch: Batch, budget: Budget, finishing: FinishingTime
) -> PlannedBatch:
    """Make plans until the memory of one, counted along its actions, fits.

    A rule determines the first reserve for messages. If the memory of a plan exceeds the limit, the excess is added to
    the reserve for the next plan. If no order fits with that reserve, half of the addition is removed and another seed
    is used, because orders differ in the memory that they need.
    """
    reserve = last = np.zeros(problem.layout.num_ranks, np.int64)
    failure: InfeasibleError | None = None
    for trial in range(_MOST_TRIALS):
        try:
            tried = problem.with_reserve(reserve.tolist()).with_search(seed=problem.seed + trial)
            planned = _plan_once(tried, batch, budget, finishing)
        except InfeasibleError as error:
            if trial == 0:
                raise
            failure, reserve = error, (reserve + last) // 2
        else:
            over = np.array(
                [max(0, need - (problem.memory.capacity_bytes or 0)) for need in planned.peak_bytes], np.int64
            )
            if not over.any():
                if trial:
                    # The added reserve does not limit the packing itself, and raises the bounds of those compared.
                    planned = replace(planned, lower_bound=packing_bound(problem, planned.packing), judged=())
                return planned
            last, reserve = reserve, reserve + over
        budget = budget.part(_TRIAL_SHARE)
    rank = int(over.argmax())
    more, capacity = size_text(int(over[rank])), size_text(problem.memory.capacity_bytes or 0)
    raise NothingFoundError(
        f"rank {rank}: every plan exceeds the memory limit of {capacity}, the last one by {more}; use smaller "
        "microbatches"
    ) from failure


def proved_plan(
    problem: PlanningProblem, packing: Packing, graph: TaskGraph, schedule: Schedule, timeline: Timeline
) -> tuple[Resolved, ExecutionPlan]:
    """Lower a schedule of a packing's tasks to a plan, and verify it.

    Returns
    -------
    tuple of Resolved, ExecutionPlan
        The graph with only the chosen strategies, and its plan.

    Raises
    ------
    PlanError
        If the schedule runs a task before its dependencies.
    """
    resolved = resolve_candidates(graph, schedule.candidate)
    single_communicator = BACKENDS[problem.backend].single_communicator
    plan = lower(
        resolved.graph,
        resolved.schedule(schedule),
        resolved.timeline(timeline),
        problem.layout,
        packing,
        boundary_shapes(problem.model, problem.layout),
        single_communicator=single_communicator,
    )
    verify(plan, problem.layout, packing, single_communicator=single_communicator)
    return resolved, plan


def _plan_once(problem: PlanningProblem, batch: Batch, budget: Budget, finishing: FinishingTime) -> PlannedBatch:
    """Make one plan under the memory limit, and count its memory."""
    budget = replace(budget, task_s=finishing.task_s).from_now()
    made = decide(problem, batch, budget)
    decided_s = budget.now()
    resolved, plan = proved_plan(problem, made.packing, made.graph, made.schedule, made.timeline)
    needs: tuple[int, ...] = ()
    # Emulated costs have no workspace of single passes.
    if problem.memory.capacity_bytes is not None and isinstance(problem.costs, ProfileCosts):
        needs = peak_bytes(plan, resolved.graph, problem.layout, made.packing, problem.costs)
    if budget.seconds is not None:
        finishing.took(budget.now() - decided_s, made.graph.num_tasks)
    return PlannedBatch(**vars(made), plan=plan, resolved=resolved, peak_bytes=needs)
