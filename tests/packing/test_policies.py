import contextlib
import itertools
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeloom.cost import StrategyCost
from pipeloom.errors import InputError
from pipeloom.layout import ModulePlacement, separate
from pipeloom.limits import MAX_SEED
from pipeloom.packing import (
    POLICIES,
    Loads,
    PackingSpec,
    assign_to_replicas,
    check_always_packs,
    cost_loads,
    group,
    height_bound,
    pack,
    packed_batch,
    split_oversized,
    token_loads,
)
from pipeloom.packing.choices import even_microbatches, filled_microbatches
from pipeloom.packing.pack import check_budget
from pipeloom.packing.policies import reads_loads
from pipeloom.spec import Batch, Chunk, Sample, Workload
from pipeloom.spec.datasets import cut, draw_samples
from tests.cases import ToyCosts, random_batch, vlm_spec

MODEL = vlm_spec()
LAYOUT = separate(MODEL, 2, {"vision": ModulePlacement(1, 3)}, lambda module, layer: 1.0)


def loads_of(tokens: list[int], seed: int = 0) -> Loads:
    """Loads near the tokens, as attention makes them, and an encoder's that has nothing to do with them."""
    counts = np.array(tokens, np.int64)
    rng = np.random.default_rng(seed)
    backbone = counts + counts**2 / rng.integers(50, 500)
    return Loads(counts, backbone, rng.random(len(tokens)) * counts)


samples_st = st.lists(st.integers(1, 100), min_size=1, max_size=40)


def heaviest(groups: tuple[tuple[int, ...], ...], load: np.ndarray) -> float:
    return max(float(load[list(members)].sum()) for members in groups)


@given(samples_st, st.integers(100, 300), st.sampled_from([p for p in POLICIES if p != "exact"]))
def test_no_sample_is_lost_or_doubled_and_no_budget_broken(tokens: list[int], budget: int, policy: str) -> None:
    loads = loads_of(tokens)
    groups = group(loads, PackingSpec(budget, policy, seed=3))
    assert sorted(i for members in groups for i in members) == list(range(len(tokens)))
    for members in groups:
        assert members
        assert loads.tokens[list(members)].sum() <= budget


@settings(deadline=None, max_examples=30)
@given(
    samples_st, st.integers(100, 300), st.integers(0, 100), st.sampled_from([p for p in POLICIES if not reads_loads(p)])
)
def test_loads_decide_nothing_for_policies_that_say_so(tokens: list[int], budget: int, seed: int, policy: str) -> None:
    spec = PackingSpec(budget, policy, seed=seed)
    assert group(loads_of(tokens, seed), spec) == group(loads_of(tokens, seed + 1), spec)


class Refusing(ToyCosts):
    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        raise LookupError("asked")


@pytest.mark.parametrize("policy", POLICIES)
def test_costs_are_asked_only_where_loads_decide(policy: str) -> None:
    batch = random_batch(0, num_samples=5)
    with pytest.raises(LookupError, match="asked") if reads_loads(policy) else contextlib.nullcontext():
        packed_batch(batch, MODEL, LAYOUT, Refusing(MODEL), PackingSpec(60, policy))


def test_only_exact_may_end_without_a_packing() -> None:
    for policy in POLICIES:
        if policy != "exact":
            check_always_packs("packing.policy", policy)
    with pytest.raises(InputError, match=r"here: 'exact' may not prove a batch, and then has no packing.*'balanced'"):
        check_always_packs("here", "exact")


def test_the_page_lists_every_policy() -> None:
    page = (Path(__file__).parents[2] / "docs" / "packing.md").read_text()
    # `tuned` is of the command line alone.
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*POLICIES, "tuned"]


def test_samples_that_are_alone_keep_the_order_of_the_batch() -> None:
    loads = Loads(np.array([20, 24, 38, 29, 25]), np.array([0.7, 0.2, 0.0, 0.5, 0.0]), np.zeros(5))
    for least in (5, 1 << 30):
        assert group(loads, PackingSpec(1 << 30, "balanced", least)) == ((0,), (1,), (2,), (3,), (4,))


with_empty_st = st.lists(st.sampled_from([0, 0, 1, 18, 40, 100]), min_size=1, max_size=12)


@settings(deadline=None, max_examples=200)
@given(with_empty_st, with_empty_st, st.integers(100, 200), st.integers(1, 14), st.booleans())
@example([18, 0, 0], [18, 0, 0], 100, 3, False)
def test_a_minimum_holds_for_samples_without_tokens_or_load(
    tokens: list[int], load: list[int], budget: int, least: int, shared: bool
) -> None:
    """Measured costs may say that a short sample takes no time, and full shares may empty a microbatch."""
    size = min(len(tokens), len(load))
    counts, work = np.array(tokens[:size]), np.array(load[:size], float)
    loads = Loads(counts, work, np.zeros(size), 1 + counts % 3 if shared else None, 4 if shared else 1)
    for policy in ("algorithm1_opened", "balanced", "balanced_encoder", "exact", "planned"):
        spec = PackingSpec(budget, policy, least)
        for groups in (group(loads, spec), even_microbatches(loads, spec, min(least, size))):
            assert len(groups) >= min(least, size), policy
            assert sorted(i for members in groups for i in members) == list(range(size))
            assert all(members and counts[list(members)].sum() <= budget for members in groups)


@given(samples_st, st.integers(100, 300), st.integers(0, 100))
def test_balanced_is_never_heavier_than_algorithm_1(tokens: list[int], budget: int, seed: int) -> None:
    loads = loads_of(tokens, seed)
    ours = heaviest(group(loads, PackingSpec(budget, "balanced", seed=seed)), loads.backbone)
    for policy in ("algorithm1", "algorithm1_opened"):
        assert ours <= heaviest(group(loads, PackingSpec(budget, policy)), loads.backbone) * (1 + 1e-9)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(60, 120), st.integers(0, 99))
def test_exact_equals_trying_everything(tokens: list[int], budget: int, seed: int) -> None:
    loads = loads_of(tokens, seed)
    groups = group(loads, PackingSpec(budget, "exact"))
    best = min(
        np.bincount(bins, weights=loads.backbone).max()
        for bins in map(np.array, itertools.product(range(len(groups)), repeat=len(tokens)))
        if np.bincount(bins, weights=loads.tokens).max() <= budget
    )
    assert heaviest(groups, loads.backbone) == pytest.approx(best)
    assert height_bound(loads.backbone, len(groups)) <= best * (1 + 1e-12)


def test_exact_says_so_when_it_cannot_prove() -> None:
    rng = np.random.default_rng(1)
    loads = loads_of(rng.integers(40, 100, 60).tolist())
    with pytest.raises(InputError, match=r"'exact' did not prove 60 samples in \d+ microbatches.*'balanced'"):
        group(loads, PackingSpec(200, "exact"))


def test_algorithm_1_by_hand() -> None:
    # As printed each microbatch is filled before the next is opened; opened beforehand they share.
    tokens = np.array([6, 5, 4, 3, 2])
    loads = Loads(tokens, tokens.astype(float), np.zeros(5))
    assert group(loads, PackingSpec(11, "algorithm1")) == ((0, 1), (2, 3, 4))
    assert group(loads, PackingSpec(11, "algorithm1_opened")) == ((0, 3, 4), (1, 2))
    # Three opened beforehand on wish.
    assert group(loads, PackingSpec(11, "algorithm1_opened", 3)) == ((0,), (1, 4), (2, 3))


def test_full_microbatches_are_at_least_as_many_as_wished_for() -> None:
    loads = loads_of([3] * 12)
    for least in (None, 8):
        filled = list(filled_microbatches(loads, PackingSpec(100, num_microbatches=least)))
        assert filled
        assert all(len(groups) >= (least or 6) for groups in filled)
    assert min(map(len, filled_microbatches(loads, PackingSpec(100)))) == 6


@pytest.mark.parametrize("mixture", ["datamix2", "datamix3"])
def test_balanced_is_within_one_per_cent_on_the_mixtures(mixture: str) -> None:
    for seed, budget in itertools.product(range(3), (8192, 16384, 32768)):
        batch = Batch(tuple(cut(sample, 8192, 48) for sample in draw_samples(mixture, 128, seed)))
        loads = token_loads(batch, MODEL, 12 * 5120)
        groups = group(loads, PackingSpec(budget, "balanced", seed=seed))
        assert heaviest(groups, loads.backbone) <= 1.01 * height_bound(loads.backbone, len(groups))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000))
def test_with_the_encoders_load_both_are_even(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, 30, 200)
    # Half of the samples have images only, half text only: the backbone cannot tell them apart.
    loads = Loads(tokens, tokens.astype(float), np.where(np.arange(200) % 2, tokens, 0).astype(float))
    # With some room: full microbatches leave no choice.
    spec = PackingSpec(600, "balanced_encoder", -(-int(tokens.sum()) // 500), seed=seed)
    groups = group(loads, spec)
    for load in (loads.backbone, loads.encoder):
        assert heaviest(groups, load) <= 1.03 * load.sum() / len(groups)


def test_a_document_attends_to_itself_alone() -> None:
    batch = Batch((Sample("a", 40), Sample("b", 10), Sample("c", 30)))
    costs = ToyCosts(MODEL)
    loads = cost_loads(batch, MODEL, LAYOUT, costs)
    together = token_loads(batch, MODEL, 100)
    assert together.backbone.tolist() == [40 + 16, 10 + 1, 30 + 9]
    # What the loads add up to is what the cost model says of the pack, whose lengths stay apart.
    chunks = [LAYOUT.chunks[i] for i in LAYOUT.chunks_of("lm")]

    def seconds(lengths: tuple[int, ...]) -> float:
        return sum(c.forward_s + c.backward_s for c in (costs.chunk_costs(k, Workload(lengths))[0] for k in chunks))

    assert loads.backbone.sum() == pytest.approx(seconds((40, 10, 30)) - seconds(()), rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(3, 30))
def test_oversized_samples_are_split_and_nothing_is_lost(seed: int, budget: int) -> None:
    batch = random_batch(seed, num_samples=1 + seed % 9)
    clips = {"video_seconds": (1.0, 2.0), "video_height": (64, 32), "video_width": (48, 16)}
    batch = Batch(tuple(msgspec.structs.replace(s, **clips) if i % 2 else s for i, s in enumerate(batch.samples)))
    largest = max((n for s in batch.samples for n in s.image_tokens), default=1)
    budget = max(budget, largest)
    split = split_oversized(batch, MODEL, budget)
    check_budget(split, MODEL, budget)
    for sample in batch.samples:
        pieces = [s for s in split.samples if s.id == sample.id or s.id.startswith(f"{sample.id}#")]
        assert sum(s.text_tokens for s in pieces) == sample.text_tokens
        assert tuple(n for s in pieces for n in s.image_tokens) == sample.image_tokens
        assert tuple(n for s in pieces for n in s.patches) == sample.patches
        for name in ("video_seconds", "video_height", "video_width"):
            assert tuple(n for s in pieces for n in getattr(s, name)) == getattr(sample, name)
        assert len(pieces) == 1 or all(s.sequence_tokens for s in pieces)
    assert pack(split, MODEL, LAYOUT, PackingSpec(budget, "balanced")).batch is split


def test_declared_lengths_cannot_be_split() -> None:
    for lengths in ({"lm": (9,)}, {"text": (3,)}):
        batch = Batch((Sample("a", 20, lengths=lengths), Sample("b", 3, lengths={"lm": (4,)})))
        with pytest.raises(InputError, match=r"sample 'a'.lengths: are of whole .* raise the token budget of 8"):
            split_oversized(batch, MODEL, 8)
        assert split_oversized(batch.part([1]), MODEL, 8) == batch.part([1])
    # A file with a column of lengths has empty ones.
    pieces = split_oversized(Batch((Sample("a", 20, lengths={}),)), MODEL, 8).samples
    assert [piece.text_tokens for piece in pieces] == [8, 8, 4]


def test_a_piece_with_the_id_of_another_sample_is_named() -> None:
    words = r"samples\[1\] \('a'\): is split, and its piece 'a#1' has the id of another sample; rename one"
    with pytest.raises(InputError, match=words):
        split_oversized(Batch((Sample("a#1", 8), Sample("a", 20))), MODEL, 8)
    # If both are split, no ids are equal.
    pieces = split_oversized(Batch((Sample("a#1", 9), Sample("a", 20))), MODEL, 8).samples
    assert [piece.id for piece in pieces] == ["a#1#0", "a#1#1", "a#0", "a#1", "a#2"]


def test_an_image_above_the_budget_is_named() -> None:
    with pytest.raises(InputError, match=r"'a'.image_tokens\[1\].*9 exceed the token budget of 8"):
        split_oversized(Batch((Sample("a", 3, (2, 9)),)), MODEL, 8)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 8), st.integers(0, 1000))
def test_replicas_get_even_work(num_replicas: int, seed: int) -> None:
    loads = loads_of(np.random.default_rng(seed).integers(1, 100, 128).tolist(), seed)
    assigned = assign_to_replicas(loads, num_replicas, seed)
    assert sorted(i for members in assigned for i in members) == list(range(128))
    for load in (loads.backbone, loads.backbone + loads.encoder):
        assert heaviest(assigned, load) <= 1.01 * load.sum() / num_replicas


def test_more_replicas_than_samples_are_refused() -> None:
    with pytest.raises(InputError, match=r"num_replicas.*4 is not in 1\.\.3"):
        assign_to_replicas(loads_of([1, 2, 3]), 4)


def test_random_depends_on_seed_and_iteration() -> None:
    loads = loads_of(list(range(1, 40)))
    spec = PackingSpec(100, "random", seed=1)
    assert group(loads, spec, 5) == group(loads, spec, 5)
    assert group(loads, spec, 5) != group(loads, spec, 6)
    assert group(replace(loads), PackingSpec(100, "random", seed=2), 5) != group(loads, spec, 5)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_largest_seed_serves_every_iteration(policy: str) -> None:
    loads, spec = loads_of(list(range(1, 20))), PackingSpec(100, policy, seed=MAX_SEED)
    for iteration in (0, 1):
        assert sorted(i for members in group(loads, spec, iteration) for i in members) == list(range(19))


def test_a_policy_that_is_none_is_named() -> None:
    with pytest.raises(InputError, match=r"packing.policy: 'tidy' is none of first_fit, "):
        PackingSpec(10, "tidy")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"here: 'tidy' is none of"):
        check_always_packs("here", "tidy")  # type: ignore[arg-type]
