from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.integrations.pipelining.inputs import StepInputs
from pipeloom.integrations.pipelining.running import StageLayer, StepLoss
from pipeloom.integrations.steps.planning import single_packing
from pipeloom.integrations.steps.running import stage_layout
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
    whole = Meta((2, 7), F32, spread, (2, 13))
    metas = (whole, Meta((3,), torch.int64), Meta((2,), F32, Spread(("tp",), (-1,)), (2,)))
    assert read_header(header(metas)) == metas
    boundary = Boundary()
    for length in (7, 40, 24):
        boundary.learn((2, length), (Meta((2, length), F32, spread, (2, 2 * length)),))
    assert boundary.predict((2, 11)) == (Meta((2, 11), F32, spread, (2, 22)),)


def test_unequal_shards_are_predicted_for_known_inputs_only() -> None:
    # The last of four shards, which does not grow with the whole.
    boundary, spread = Boundary(), Spread(("tp",), (0,))

    def last(length: int) -> tuple[Meta, ...]:
        return (Meta((max(0, length - 3 * -(-length // 4)),), F32, spread, (length,)),)

    for length in (8, 13, 16, 24, 20):
        assert boundary.predict((length,)) is None
        boundary.learn((length,), last(length))
    assert boundary.predict((9,)) is None
    assert boundary.predict((13,)) == last(13)


def test_shapes_are_predicted_where_all_rules_agree() -> None:
    boundary = Boundary()
    assert boundary.predict((2, 7)) is None
    boundary.learn((2, 7), of(2, 7, 16))
    assert boundary.predict((2, 7)) == of(2, 7, 16)
    # It may be 7 always, or the length.
    assert boundary.predict((2, 40)) is None
    boundary.learn((2, 40), of(2, 40, 16))
    # It may be padded, such as to 11 rows and 7 more.
    assert boundary.predict((2, 11)) is None
    boundary.learn((2, 11), of(2, 11, 16))
    assert boundary.predict((2, 30)) == of(2, 30, 16)
    # It may be truncated.
    assert boundary.predict((2, 41)) is None
    # Nothing was seen of other numbers of rows.
    assert boundary.predict((3, 11)) is None


def test_what_no_rule_explains_is_not_predicted() -> None:
    boundary = Boundary()
    for length in (3, 8, 4):
        boundary.learn((length,), of(length * length % 11, 2))
    assert boundary.predict((5,)) is None


RULES: dict[str, Callable[[int], int]] = {
    "constant": lambda n: 16,
    "proportional": lambda n: 3 * n,
    "shifted": lambda n: n + 3,
    "divided": lambda n: -(-n // 4),
    "padded": lambda n: -(-n // 64) * 64,
    "padded and shifted": lambda n: -(-n // 64) * 64 + 1,
    "patches of padded": lambda n: -(-n // 64) * 16,
    "truncated": lambda n: min(n, 1500),
    "convolution": lambda n: (n - 400) // 320 + 1,
    "two convolutions": lambda n: ((n - 10) // 5 - 2) // 2,
}


def num_predicted(rule: Callable[[int], int], lengths: list[int]) -> int:
    """Predict and learn one length after the other. Return the number of predicted shapes, which must be true."""
    boundary, predicted = Boundary(), 0
    for length in lengths:
        found = boundary.predict((2, length, 8))
        assert found in (None, of(2, rule(length), 16)), f"{length} after {lengths}"
        predicted += found is not None
        boundary.learn((2, length, 8), of(2, rule(length), 16))
    return predicted


@pytest.mark.parametrize("name", RULES)
@given(lengths=st.lists(st.integers(400, 2000), max_size=12, unique=True))
def test_what_is_predicted_is_true(name: str, lengths: list[int]) -> None:
    num_predicted(RULES[name], lengths)


def test_a_truncated_length_is_not_mistaken_for_one_that_is_rounded() -> None:
    # All extents seen are even, as if odd lengths were rounded down.
    assert num_predicted(RULES["truncated"], [400, 402, 1501, 401, 403, 700, 1400]) == 3


@pytest.mark.parametrize(
    ("lengths", "repeated"),
    [([1000] * 4 + [900], 3), ([1000, 1010, 980, 1100], 0), ([1024, 1088, 1280, 1100, 1090], 0)],
)
def test_lengths_in_one_bucket_do_not_tell_of_others(lengths: list[int], repeated: int) -> None:
    assert num_predicted(RULES["padded"], lengths) == repeated


def test_a_convolution_whose_first_lengths_are_equal() -> None:
    assert num_predicted(RULES["convolution"], [160_000, 160_000, 144_000]) == 1


@pytest.mark.parametrize("name", [name for name in RULES if name != "truncated"])
def test_most_shapes_are_predicted(name: str) -> None:
    rng = random.Random(0)
    assert num_predicted(RULES[name], [rng.randint(400, 2000) for _ in range(100)]) >= 60


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=12, unique=True))
def test_shapes_that_follow_from_two_inputs(inputs: list[tuple[int, int]]) -> None:
    boundary = Boundary()
    for one, other in inputs:
        true = of(one + other, one * other, -(-(one + other) // 16) * 16)
        assert boundary.predict((one, other)) in (None, true)
        boundary.learn((one, other), true)


def test_an_input_that_was_constant_is_not_ignored() -> None:
    # Text behind the 576 tokens of an image, then of two.
    boundary = Boundary()
    for length in (10, 90, 47, 31):
        boundary.learn((length, 576), of(length + 576))
    assert boundary.predict((50, 576)) == of(626)
    assert boundary.predict((50, 1152)) is None


@pytest.mark.parametrize(("tensor", "size"), [(torch.zeros(2, 3, dtype=torch.long), 6), (torch.zeros(2, 3, 4), 6)])
def test_sizes_are_tokens(tensor: torch.Tensor, size: int) -> None:
    assert default_size(tensor, scale=1) == size
    assert signature((tensor,), {"more": [tensor], "so": True}) == signature((tensor, tensor), {})


@pytest.mark.parametrize("sharded", [False, True])
def test_stages_stay_where_fsdp_has_placed_them(monkeypatch: pytest.MonkeyPatch, sharded: bool) -> None:
    """FSDP's offload keeps parameters on the host."""
    stage = SimpleNamespace(submod=torch.nn.Linear(1, 1), stage_index=0, is_first=True, is_last=True)
    monkeypatch.setattr(torch.distributed.fsdp, "FSDPModule", torch.nn.Linear if sharded else torch.nn.Identity)
    layer = StageLayer(stage)  # type: ignore[arg-type]
    assert layer.to("meta") is layer
    assert layer.submod.weight.device.type == ("cpu" if sharded else "meta")


def test_what_a_plan_is_made_for() -> None:
    packing = single_packing((4, 6), (1, 0), stage_layout([0], 1))
    assert [microbatch.samples for microbatch in packing.microbatches] == [(1,), (0,)]
    assert packing.parts_of(0, "stages")[0].workload.lengths == (6,)
    assert StepLoss(None).function is None
    assert StepInputs((), {}).targets(3) is None
