"""How a batch is dealt to the replicas of a pipeline."""

from __future__ import annotations

import random

import pytest

from pipeloom.cost import LayerFit, Profile, ProfileCosts
from pipeloom.packing import cost_loads, token_loads
from pipeloom.runtime.model.membership import Membership
from pipeloom.spec import Batch, Chunk, LayerSpec, Layout, ModelSpec, ModuleLayout, ModuleSpec, Sample, TensorShape

LAYER = LayerSpec("attention", TensorShape(("tokens", 4)))
MODEL = ModelSpec("lm", (ModuleSpec(name="lm", reads="sequence", layers=(LAYER,)),))
# Attention is most of the work, so that tokens say little about it.
FIT = LayerFit((1e-4, 0, 1e-7, 1e-6), (2e-4, 0, 2e-7, 2e-6), (0, 0, 8, 0))
COSTS = ProfileCosts(MODEL, Profile("made", {"lm/attention": FIT}))
LAYOUT = Layout(1, (ModuleLayout("lm"),), (Chunk("lm", (0, 0), 0),))


def heaviest(shares: list[tuple[int, ...]], batch: Batch) -> float:
    loads = cost_loads(batch, MODEL, LAYOUT, COSTS).backbone
    return max(float(loads[list(share)].sum()) for share in shares)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num", [2, 3])
def test_shares_are_even_in_cost_and_not_in_tokens(seed: int, num: int) -> None:
    rng = random.Random(seed)
    batch = Batch(tuple(Sample(str(i), rng.choice((4, 5, 7, 60, 90))) for i in range(24)))
    places = [Membership(0, replica, num, None, None, None) for replica in range(num)]
    by_tokens = [place.share(batch, MODEL) for place in places]
    by_cost = [place.share(batch, MODEL, lambda b: cost_loads(b, MODEL, LAYOUT, COSTS)) for place in places]
    for shares in (by_tokens, by_cost):
        assert sorted(i for share in shares for i in share) == list(range(24))
    assert heaviest(by_cost, batch) <= heaviest(by_tokens, batch) * (1 + 1e-9)
    total = float(cost_loads(batch, MODEL, LAYOUT, COSTS).backbone.sum())
    assert heaviest(by_cost, batch) < 1.1 * total / num
    tokens = token_loads(batch, MODEL).tokens
    assert max(tokens[list(share)].sum() for share in by_tokens) < 1.1 * tokens.sum() / num


def test_one_replica_takes_everything() -> None:
    batch = Batch((Sample("a", 3), Sample("b", 4)))
    assert Membership(0, 0, 1, None, None, None).share(batch, MODEL) == (0, 1)
