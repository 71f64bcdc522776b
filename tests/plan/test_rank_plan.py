"""A rank is given its own actions of a plan alone, and runs them as if it had the whole plan."""

from __future__ import annotations

import msgspec
import pytest

from pipeloom.plan import BackendName, RankAnswer, Verb, delivery_of, joined_posts, rank_plans
from pipeloom.planner.client import fallback_plan
from pipeloom.planner.messages import answer_of
from tests.cases import random_batch
from tests.planner.cases import random_problem

BACKENDS: tuple[tuple[BackendName, bool], ...] = (("gloo", False), ("nccl", True))


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_what_travels_to_a_rank_has_its_own_actions_and_no_others(seed: int, everywhere: bool) -> None:
    problem, batch = random_problem(seed, everywhere=everywhere), random_batch(seed)
    planned = fallback_plan(problem, batch)
    answer, plan = answer_of(planned, search_s=0.0, ready_ns=0), planned.plan
    for backend, batches_p2p in BACKENDS:
        delivery = delivery_of(answer, planned.packing, problem.layout, backend=backend)
        found = [msgspec.msgpack.decode(data, type=RankAnswer) for data in delivery.by_rank]
        assert [each.plan for each in found] == list(rank_plans(plan, problem.layout, batches_p2p=batches_p2p))
        assert found[0].plan == delivery.first
        # All that a rank decodes: its own actions, and none twice.
        assert [each.plan.actions for each in found] == list(plan.ranks)
        assert sum(data.count(b"chunk") for data in delivery.by_rank) == sum(
            bool(action.chunk) for actions in plan.ranks for action in actions
        )
        for rank, each in enumerate(found):
            assert (each.plan.rank, each.plan.longest) == (rank, max(map(len, plan.ranks)))
            assert each.packing == answer.packing
            assert each.plan.joined == (tuple(sorted(joined_posts(plan, rank))) if batches_p2p else None)
        placed = [
            (problem.layout.chunk_names[unit.chunk], unit.microbatch, unit.sub_microbatch)
            for unit in found[-1].plan.placed
        ]
        assert placed == [
            (action.chunk, action.microbatch, action.sub_microbatch)
            for actions in plan.ranks
            for action in actions
            if everywhere and action.verb is Verb.F and action.chunk.startswith("vision.")
        ]
