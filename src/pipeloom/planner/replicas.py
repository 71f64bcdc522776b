"""Assignment of the samples of the next global batch to data-parallel replicas, by the estimated time of each share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeloom.cost import Correction
from pipeloom.errors import InfeasibleError
from pipeloom.packing import PackedReplica, ReplicaAssignment, assign_by_time, cost_loads, packing_of
from pipeloom.planner.joint import PackingSearch, tuned
from pipeloom.planner.problem import PlanningProblem
from pipeloom.search import Budget
from pipeloom.spec import Batch
from pipeloom.tuning import TuningSpec, batch_sizes, check_layout, tune_replicas


class ReplicaEstimates:
    """Estimates the time of a part of a batch from one even packing with static orders.

    Each estimate takes milliseconds and counts as one evaluation of ``budget``. ``problems`` has one problem for each
    replica.
    """

    def __init__(self, problems: Sequence[PlanningProblem], batch: Batch, budget: Budget) -> None:
        self.problems = [problem.with_search(method="default") for problem in problems]
        self.batch = batch
        self.meter = budget.start()

    def __call__(self, members: Sequence[int], replica: int) -> float | None:
        """Return the estimated time in ns of the samples at these positions on a replica.

        Return infinity if they do not fit, and None once the budget is spent.

        Raises
        ------
        InputError
            If a single sample exceeds the token budget.
        """
        if self.meter.left(1) == 0:
            return None
        self.meter.used += 1
        batch, problem = self.batch.part(members), self.problems[replica]
        if problem.tuning is not None and not problem.tuning.searches:
            try:
                return tuned(problem, batch).ns
            except InfeasibleError:
                return float("inf")
        return PackingSearch(problem, batch, Budget(evaluations=1)).estimate()


def assign_planned(
    problem: PlanningProblem, batch: Batch, *, budget: Budget, corrections: Sequence[Correction] = ()
) -> ReplicaAssignment:
    """Assign a global batch to the replicas of the problem's layout so that the slowest replica is as fast as possible.

    Parameters
    ----------
    problem : PlanningProblem
        Problem of one replica; ``layout.parallelism.data`` is the number of replicas.
    batch : Batch
        The global batch.
    budget : Budget
        Each estimate of the share of a replica is one evaluation. A number of evaluations makes the result
        deterministic. If the budget ends before every replica was estimated once, the assignment is by load.
    corrections : sequence of Correction
        Measured correction of each replica. A slow replica receives less work. Empty: all replicas match the problem.

    Raises
    ------
    InputError
        If there are fewer samples than replicas, or a single sample exceeds the token budget.
    """
    loads = cost_loads(batch, problem.model, problem.layout, problem.costs)
    number = problem.layout.parallelism.data
    problems = [problem.corrected(each) for each in corrections] or [problem] * number
    return assign_by_time(loads, number, ReplicaEstimates(problems, batch, budget), problem.seed)


def pack_tuned(problem: PlanningProblem, batch: Batch, num_replicas: int) -> list[PackedReplica]:
    """Assign a batch to replicas and pack it by simulated time, with microbatches in their running order.

    Raises
    ------
    InputError
        If the first rank does not hold all encoders.
    """
    check_layout(problem.layout)
    tuning, spec = problem.tuning or TuningSpec(), problem.packing
    problem = replace(problem, tuning=tuning)
    assert problem.pipeline is not None
    packed = []
    tuned_shares = tune_replicas(problem.pipeline, batch, num_replicas, spec, tuning, spec.seed)
    for replica, share in enumerate(tuned_shares):
        packing = packing_of(share.batch, problem.model, problem.layout, share.tuned.groups)
        loads = batch_sizes(problem.pipeline, share.batch).loads
        packed.append(PackedReplica(replica, loads, packing, share.tuned.planned_ns / 1e9))
    return packed
