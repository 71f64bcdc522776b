"""Training under a cap on memory that keeping everything breaks: the same losses, and no more bytes than allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.errors import InfeasibleError
from pipeloom.planner import PlanningProblem, plan_batch
from pipeloom.runtime.launch.processes import launch
from pipeloom.search import Budget
from pipeloom.spec import Strategy, batch_from_dicts
from pipeloom.taskgraph.iteration import MemoryLimit
from tests.planner.cases import with_costs
from tests.runtime.memory_training import ITERATIONS, SEED, capped_trainings, measured_problem
from tests.runtime.training import DOCUMENTS, data, losses_undivided, task

pytestmark = pytest.mark.ranks

LEAN: tuple[Strategy, ...] = ("keep", "recompute", "selective")


def offering(
    whole: PlanningProblem, strategies: tuple[Strategy, ...], capacity: int | None, split: bool = False
) -> PlanningProblem:
    problem = with_costs(whole, strategies=strategies, split_backward=split)
    return replace(problem, memory=MemoryLimit(capacity))


def least_capacity(whole: PlanningProblem, strategies: tuple[Strategy, ...], split: bool = False) -> int:
    """Bytes of a rank under which every batch can just be planned, to two per cent."""
    low, high = 2**18, 0
    while not high or high - low > high // 50:
        middle = (low + high) // 2 if high else 2 * low
        problem = offering(whole, strategies, middle, split).with_search(method="portfolio")
        try:
            for i, samples in enumerate(data.batches(SEED, ITERATIONS, DOCUMENTS)):
                batch = batch_from_dicts([task.describe(sample) for sample in samples], i)
                plan_batch(problem, batch, budget=Budget(evaluations=1))
        except InfeasibleError:
            low = middle
        else:
            high = middle
    return high


@pytest.mark.full
def test_training_under_a_cap_recomputes_fits_and_loses_nothing() -> None:
    whole = measured_problem(2)
    keeps, lean = least_capacity(whole, ("keep",)), least_capacity(whole, LEAN, split=True)
    assert lean < 0.97 * keeps
    cap = (lean + keeps) // 2
    problems = [offering(whole, LEAN, cap, split=True), offering(whole, LEAN, cap)]
    ranks = launch(capped_trainings, 2, problems, [True, False])
    undivided = losses_undivided(ITERATIONS)
    for rank in ranks:
        for found in rank:
            assert found.losses == pytest.approx(undivided, abs=1e-8, rel=0)
            # How many messages are on their way at once is the ranks' real speed, and only some are planned for.
            assert max(found.peaks) <= 1.02 * cap < keeps
    for number, fresh in enumerate((True, False)):
        assert sum(rank[number].recomputed for rank in ranks) > 0
        assert set(ranks[0][number].fresh) == {fresh}
