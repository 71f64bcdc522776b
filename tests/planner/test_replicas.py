"""Dealing to replicas by planned time: sound on random problems, and told with a plan."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost import Correction
from pipeloom.errors import InputError
from pipeloom.packing import PackingSpec, assign_to_replicas, cost_loads
from pipeloom.planner import PlanningProblem, Request
from pipeloom.planner.messages import decode, encode
from pipeloom.planner.replicas import ReplicaEstimates, assign_planned
from pipeloom.planner.service import answer_request
from pipeloom.search import Budget, SearchParams
from pipeloom.search.params import PackingParams
from pipeloom.spec import Batch, Parallelism, Sample
from pipeloom.taskgraph.iteration import MemoryLimit
from tests.cases import random_batch
from tests.planner.cases import random_problem
from tests.planner.test_strategies import tight


def with_replicas(problem: PlanningProblem, num_replicas: int, budget_s: float = 0.05) -> PlanningProblem:
    """Replicas, and all the time of a plan for the dealing."""
    layout = msgspec.structs.replace(problem.layout, parallelism=Parallelism(data=num_replicas))
    search = SearchParams(packings=PackingParams(dealing_share=1.0))
    return replace(problem, layout=layout, search=search, budget_s=budget_s)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10_000), st.booleans(), st.booleans(), st.integers(1, 3))
def test_never_planned_slower_than_assigned_by_loads(
    seed: int, everywhere: bool, planned: bool, num_replicas: int
) -> None:
    problem, batch = with_replicas(random_problem(seed, everywhere=everywhere), num_replicas), random_batch(seed)
    if not planned:
        packing = PackingSpec(problem.packing.token_budget, "first_fit")
        problem = replace(problem, packing=packing)
    found = assign_planned(problem, batch, budget=Budget(evaluations=20))
    assert found == assign_planned(problem, batch, budget=Budget(evaluations=20))
    assert sorted(i for members in found.members for i in members) == list(range(len(batch.samples)))
    loads = cost_loads(batch, problem.model, problem.layout, problem.costs)
    estimate = ReplicaEstimates([problem] * num_replicas, batch, Budget(evaluations=100))
    slowest = max(estimate(members, 0) or 0.0 for members in assign_to_replicas(loads, num_replicas, seed))
    assert num_replicas == 1 or found.slowest <= slowest


def test_a_replica_with_a_slow_rank_has_less_to_do() -> None:
    shorter = []
    for seed in range(12):
        slow = seed % 2
        problem, batch = with_replicas(random_problem(seed), 2), random_batch(seed, num_samples=24)
        few = Budget(evaluations=40)
        ranks = tuple(
            2.0 if rank == seed % problem.layout.num_ranks else 1.0 for rank in range(problem.layout.num_ranks)
        )
        corrections = [Correction(slowness=ranks if replica == slow else ()) for replica in range(2)]
        estimate = ReplicaEstimates([problem.corrected(each) for each in corrections], batch, Budget(evaluations=200))

        def slowest(members: tuple[tuple[int, ...], ...], estimate: ReplicaEstimates = estimate) -> float:
            return max(estimate(share, replica) or 0.0 for replica, share in enumerate(members))

        found = assign_planned(problem, batch, budget=few, corrections=corrections)
        by_loads = assign_to_replicas(cost_loads(batch, problem.model, problem.layout, problem.costs), 2, seed)
        assert found.slowest == slowest(found.members) <= slowest(by_loads)
        # Estimates are few, so that not knowing may be luckier once, but never by much, and not on average.
        alike = slowest(assign_planned(problem, batch, budget=few).members)
        shorter.append(found.slowest / alike)
        # As two replicas that are slow in the same way.
        both = assign_planned(problem, batch, budget=few, corrections=[corrections[slow]] * 2)
        assert both.slowest >= found.slowest * 0.99
    assert max(shorter) < 1.05
    assert np.mean(shorter) < 0.8


def test_where_nothing_fits_it_is_assigned_by_loads() -> None:
    problem, batch = with_replicas(random_problem(5), 2), random_batch(4)
    hopeless = replace(problem, memory=MemoryLimit(1))
    found = assign_planned(hopeless, batch, budget=Budget(evaluations=20))
    assert found.slowest == float("inf")
    assert found.members == assign_to_replicas(
        cost_loads(batch, problem.model, problem.layout, hopeless.costs), 2, problem.seed
    )


@pytest.mark.full
def test_under_a_tight_cap_offering_to_offload_takes_no_room_from_shares() -> None:
    batch = random_batch(4)
    problem = with_replicas(tight(4, batch), 2)
    assert "offload" in problem.costs.strategies
    estimate = ReplicaEstimates([problem], batch, Budget(evaluations=10))
    assert (estimate(tuple(range(len(batch.samples))), 0) or 0.0) < float("inf")


def test_the_planner_tells_how_the_batch_after_is_assigned() -> None:
    # Time that never runs out, of which all is the dealing's: what it leaves, the plan has.
    problem = with_replicas(random_problem(5), 2, budget_s=2.0)
    now, later = random_batch(1), msgspec.structs.replace(random_batch(2), iteration=1)
    request = decode(Request, encode(Request(now, Correction(), later)))
    answer = answer_request(problem, request)
    assert len(answer.replica_of_sample) == len(later.samples)
    assert set(answer.replica_of_sample) == {0, 1}
    assert len(answer.packing.samples) >= 1
    assert answer_request(with_replicas(problem, 2), Request(now)).replica_of_sample == ()


def test_a_batch_that_cannot_be_divided_costs_the_one_before_nothing() -> None:
    problem = with_replicas(random_problem(5), 2)
    small = Batch((Sample("alone", 3),), 1)
    with pytest.raises(InputError, match="num_replicas"):
        assign_planned(problem, small, budget=Budget(evaluations=5))
    answer = answer_request(problem, Request(random_batch(1), Correction(), small))
    assert answer.replica_of_sample == ()
    assert answer.plan.iteration == random_batch(1).iteration
