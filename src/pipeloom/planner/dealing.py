"""Dealing the samples of a coming global batch to data-parallel replicas, by what their shares will take."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.cost import Correction
from pipeloom.packing import Dealt, cost_loads, deal_by_time
from pipeloom.planner.joint import Glances
from pipeloom.planner.problem import Problem
from pipeloom.search import StoppingRule
from pipeloom.spec import Batch


def deal_planned(
    problem: Problem, batch: Batch, *, budget: StoppingRule, seed: int, corrections: Sequence[Correction] = ()
) -> Dealt:
    """Deal a global batch to the replicas of the problem's layout, so that the slowest is planned to be fast.

    Parameters
    ----------
    problem : Problem
        Of one replica; ``layout.parallelism.data`` says how many there are.
    batch : Batch
        The global batch.
    budget : StoppingRule
        A replica's share looked at is one evaluation; with `Evaluations` the answer is always the same. Where it ends
        before every replica has been looked at once, the dealing is by loads.
    seed : int
    corrections : sequence of Correction
        Of every replica, as its ranks were measured: a slow one gets less. Empty: all are as the problem says.

    Raises
    ------
    InputError
        Fewer samples than replicas, or one above the token budget.
    """
    loads = cost_loads(batch, problem.model, problem.layout, problem.costs)
    number = problem.layout.parallelism.data
    problems = [problem.corrected(each) for each in corrections] or [problem] * number
    return deal_by_time(loads, number, Glances(problems, batch, budget, seed), seed)
