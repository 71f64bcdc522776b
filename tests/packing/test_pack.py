import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InputError
from pipeloom.layout import ModulePlacement, separate
from pipeloom.packing import PackingSpec, pack, packing_from_counts
from pipeloom.plan import packing_counts
from pipeloom.spec import Batch, Sample
from tests.cases import random_batch, random_case, vlm_spec

MODEL = vlm_spec()
LAYOUT = separate(MODEL, 2, {"vision": ModulePlacement(1, 3)}, lambda module, layer: 1.0)


@given(st.integers(0, 10_000), st.sampled_from(["first_fit", "first_fit_decreasing"]))
def test_every_sample_is_packed_once_within_the_budget(seed: int, policy: str) -> None:
    batch = random_batch(seed, num_samples=1 + seed % 20)
    packing = pack(batch, MODEL, LAYOUT, PackingSpec(40, policy))
    members = [i for microbatch in packing.microbatches for i in microbatch.samples]
    assert sorted(members) == list(range(len(batch.samples)))
    for microbatch in packing.microbatches:
        assert sum(batch.samples[i].sequence_tokens for i in microbatch.samples) <= 40
        vision, lm = microbatch.parts
        images = [n for i in microbatch.samples for n in batch.samples[i].patches]
        assert [n for part in vision for n in part.workload.lengths] == images
        # Even parts: ceil(N / B) of them, sizes within one of each other.
        assert len(vision) == -(-len(images) // 3)
        assert not vision or max(p.count for p in vision) - min(p.count for p in vision) <= 1
        assert [part.count for part in lm] == [len(microbatch.samples)]


def test_first_fit_in_hand_worked_order() -> None:
    batch = Batch(tuple(Sample(f"s{i}", n) for i, n in enumerate([5, 6, 4, 5])))
    in_order = pack(batch, MODEL, LAYOUT, PackingSpec(10, "first_fit"))
    assert [m.samples for m in in_order.microbatches] == [(0, 2), (1,), (3,)]
    decreasing = pack(batch, MODEL, LAYOUT, PackingSpec(10, "first_fit_decreasing"))
    assert [m.samples for m in decreasing.microbatches] == [(1, 2), (0, 3)]


def test_text_only_microbatch_gives_the_encoder_nothing() -> None:
    packing = pack(Batch((Sample("a", 3),)), MODEL, LAYOUT, PackingSpec(10))
    assert packing.parts_of(0, "vision") == ()


def test_a_sample_above_the_budget_is_named_and_not_dropped() -> None:
    with pytest.raises(InputError, match=r"'b'.*11 tokens exceed the token budget of 10.*raise"):
        pack(Batch((Sample("a", 3), Sample("b", 11))), MODEL, LAYOUT, PackingSpec(10))


@given(st.integers(0, 10_000))
def test_a_packing_survives_its_counts(seed: int) -> None:
    model, layout, packing = random_case(seed)
    counts = packing_counts(packing)
    assert packing_from_counts(packing.batch, model, layout, counts.samples, counts.counts) == packing


def test_counts_for_other_data_are_refused() -> None:
    batch = Batch((Sample("a", 3, (2, 2)), Sample("b", 3)))
    good = packing_counts(pack(batch, MODEL, LAYOUT, PackingSpec(20, "first_fit")))
    with pytest.raises(InputError, match="not exactly the samples"):
        packing_from_counts(batch, MODEL, LAYOUT, ((0,),), good.counts)
    with pytest.raises(InputError, match="does not divide 2 instances"):
        packing_from_counts(batch, MODEL, LAYOUT, good.samples, (((1,), (2,)),))
