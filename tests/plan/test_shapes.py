"""A plan for this very model and batch passes, outputs that are cut for decoders included; any other is told."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeloom.errors import PlanError
from pipeloom.plan import ExecutionPlan, Unit, check_shapes, make_routes

from .cases import random_case

SEEDS = st.integers(0, 10**9)


@given(SEEDS)
def test_plans_of_the_batch_pass(seed: int) -> None:
    case = random_case(seed)
    check_shapes(case.plan, case.model, case.layout, case.packing)


def test_the_random_plans_have_outputs_that_are_cut() -> None:
    def is_cut(seed: int) -> bool:
        case = random_case(seed)
        graph = case.graph
        assert graph.labels is not None
        units = {(label.chunk, label.microbatch, label.sub_microbatch) for label in graph.labels}
        routes = make_routes(case.layout, case.packing, [Unit(*unit) for unit in sorted(units)])
        return any(transfer.piece is not None for transfer in routes.transfers)

    assert sum(is_cut(seed) for seed in range(200)) > 5


@given(SEEDS, st.data())
def test_another_shape_is_reported(seed: int, data: st.DataObject) -> None:
    case = random_case(seed)
    plan = case.plan
    places = [(r, i) for r, actions in enumerate(plan.ranks) for i, a in enumerate(actions) if a.shape is not None]
    assume(places)
    rank, step = data.draw(st.sampled_from(places))
    changed = [list(actions) for actions in plan.ranks]
    shape = changed[rank][step].shape
    assert shape is not None
    longer = (shape[0] + 1, *shape[1:])
    changed[rank][step] = msgspec.structs.replace(changed[rank][step], shape=longer)
    other = ExecutionPlan(plan.num_ranks, plan.iteration, plan.layout, tuple(map(tuple, changed)))
    with pytest.raises(PlanError, match="has another shape than"):
        check_shapes(other, case.model, case.layout, case.packing)
