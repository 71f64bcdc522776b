from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.integrations.pipelining.inputs import StepInputs
from pipeloom.integrations.pipelining.running import StepLoss
from pipeloom.integrations.steps.planning import single_packing
from pipeloom.integrations.steps.shapes import (
    Boundary,
    Meta,
    Spread,
    bundle,
    flat_meta,
    header,
    metas_of,
    read_header,
    unbundle,
)
from pipeloom.integrations.steps.sizes import default_size, signature

F32 = torch.float32


def of(*shape: int) -> tuple[Meta, ...]:
    return (Meta(shape, F32),)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float64, F32, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_several_tensors_travel_as_one(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    torch.manual_seed(0)
    tensors = [(torch.randn(shape) * 100).to(dtype) for dtype, shape in kinds]
    metas = metas_of(tensors, 0)
    flat = bundle(tensors, metas)
    assert (tuple(flat.shape), flat.dtype) == flat_meta(metas)
    assert read_header(header(metas)) == metas
    for found, wanted in zip(unbundle(flat, metas), tensors, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_how_tensors_lie_over_a_mesh_is_reported_and_predicted() -> None:
    spread = Spread(("dp_shard", "tp"), (-2, 1))
    metas = (Meta((2, 7), F32, spread), Meta((3,), torch.int64), Meta((2,), F32, Spread(("tp",), (-1,))))
    assert read_header(header(metas)) == metas
    boundary = Boundary()
    for length in (7, 40):
        boundary.learn((2, length), (Meta((2, length), F32, spread),))
    assert boundary.predict((2, 11)) == (Meta((2, 11), F32, spread),)


def test_shapes_are_predicted_where_all_rules_agree() -> None:
    boundary = Boundary()
    assert boundary.predict((2, 7)) is None
    boundary.learn((2, 7), of(2, 7, 16))
    assert boundary.predict((2, 7)) == of(2, 7, 16)
    # It may be 7 always, or the length.
    assert boundary.predict((2, 40)) is None
    boundary.learn((2, 40), of(2, 40, 16))
    assert boundary.predict((2, 11)) == of(2, 11, 16)
    # Nothing was seen of other numbers of rows.
    assert boundary.predict((3, 11)) is None


def test_what_no_rule_explains_is_not_predicted() -> None:
    boundary = Boundary()
    for length in (3, 8, 4):
        boundary.learn((length,), of(length * length % 11, 2))
    assert boundary.predict((5,)) is None


@given(st.integers(2, 5), st.integers(0, 3), st.lists(st.integers(9, 89), min_size=9, max_size=12, unique=True))
def test_what_is_predicted_is_true(divisor: int, apart: int, lengths: list[int]) -> None:
    boundary, predicted = Boundary(), 0
    for length in (8, 90, *lengths):
        true = of(2, -(-length // divisor), length + apart, 3 * length)
        found = boundary.predict((2, length))
        assert found in (None, true)
        predicted += found is not None
        boundary.learn((2, length), true)
    assert predicted


@pytest.mark.parametrize(("tensor", "size"), [(torch.zeros(2, 3, dtype=torch.long), 6), (torch.zeros(2, 3, 4), 6)])
def test_sizes_are_tokens(tensor: torch.Tensor, size: int) -> None:
    assert default_size(tensor, scale=1) == size
    assert signature((tensor,), {"more": [tensor], "so": True}) == signature((tensor, tensor), {})


def test_what_a_plan_is_made_for() -> None:
    packing = single_packing((4, 6), (1, 0))
    assert [microbatch.samples for microbatch in packing.microbatches] == [(1,), (0,)]
    assert packing.parts_of(0, "stages")[0].workload.lengths == (6,)
    assert StepLoss(None).function is None
    assert StepInputs((), {}).targets(3) is None
