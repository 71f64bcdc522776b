"""Partitions found by loads alone: what is reported is so, and nothing gets worse or lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.arrange import Arrangement, LayerChain, Rule, kernels
from pipeloom.arrange.evaluate import arrays_of
from pipeloom.arrange.layer_chain import chunk_costs
from pipeloom.arrange.rules import from_plan, to_plan
from tests.arrange.chains import arranged_chains


def fullest(chain: LayerChain, arrangement: Arrangement) -> int:
    """Largest load of a rank, with the forwards before it and the backwards after it that nothing can fill."""
    costs = chunk_costs(chain, arrangement)
    work = costs.forward_ns + costs.backward_ns + costs.weight_ns
    fillable = bool(costs.weight_ns.any())
    found = []
    for rank in set(arrangement.ranks):
        mine = [c for c, home in enumerate(arrangement.ranks) if home == rank]
        first = mine[0]
        hops = sum(chain.delay_ns for c in range(first) if arrangement.ranks[c] != arrangement.ranks[c + 1])
        ends = int(costs.forward_ns[:first].sum()) + hops
        ends += 0 if fillable else int(costs.backward_ns[:first].sum())
        found.append(int(work[mine].sum()) * chain.num_microbatches + ends)
    return max(found)


@settings(deadline=None, max_examples=80)
@given(arranged_chains(), st.integers(0, 200), st.booleans(), st.integers(1, 2**32))
def test_repartition_never_gets_worse_and_tells_the_truth(
    case: tuple[LayerChain, Arrangement, Rule], steps: int, ranks_too: bool, seed: int
) -> None:
    chain, arrangement, rule = case
    arrays = arrays_of(chain)
    plan = to_plan(arrangement, rule, chain.num_layers)
    strategy = np.array(arrangement.strategies or (0,) * chain.num_layers, dtype=np.int64)
    state = np.array([seed], np.uint64)
    found = kernels.repartition(
        plan, strategy, arrays.layers, chain.num_ranks, chain.num_microbatches, chain.delay_ns, ranks_too, 0,
        max(1, steps), state,
    )  # fmt: skip
    made, moved = from_plan(plan, strategy)
    assert all(a < b for a, b in zip(made.cuts, made.cuts[1:], strict=False))
    assert (made.cuts[0], made.cuts[-1], made.num_chunks) == (0, chain.num_layers, arrangement.num_chunks)
    assert ranks_too or made.ranks == arrangement.ranks
    assert moved.period == rule.period
    if arrangement.num_chunks > 1:
        assert found == fullest(chain, made) <= fullest(chain, arrangement)
    if made == arrangement:
        assert (moved.keys == rule.keys).all()


def homes(arrangement: Arrangement) -> list[int]:
    """Rank of every layer."""
    sizes = np.diff(arrangement.cuts)
    return [int(rank) for rank in np.repeat(arrangement.ranks, sizes)]


@settings(deadline=None, max_examples=120)
@given(arranged_chains(), st.floats(0.8, 1.2), st.integers(0, 3), st.integers(1, 2**32))
def test_layers_change_places_only_where_every_rank_stays_below_the_limit(
    case: tuple[LayerChain, Arrangement, Rule], part: float, more: int, seed: int
) -> None:
    chain, arrangement, rule = case
    arrays = arrays_of(chain)
    most = min(chain.num_layers, arrangement.num_chunks + more)
    plan = to_plan(arrangement, rule, most)
    before = plan.copy()
    strategy = np.array(arrangement.strategies or (0,) * chain.num_layers, dtype=np.int64)
    limit = int(fullest(chain, arrangement) * part)
    changed = kernels.exchange_layers(
        plan, strategy, arrays.layers, chain.num_ranks, most, chain.num_microbatches, chain.delay_ns, limit,
        np.array([seed], np.uint64),
    )  # fmt: skip
    if not changed:
        assert (plan == before).all()
        return
    made, moved = from_plan(plan, strategy)
    assert all(a < b for a, b in zip(made.cuts, made.cuts[1:], strict=False))
    assert (made.cuts[0], made.cuts[-1]) == (0, chain.num_layers)
    assert made.num_chunks <= most
    assert fullest(chain, made) < limit
    was, now = homes(arrangement), homes(made)
    assert 2 <= sum(a != b for a, b in zip(was, now, strict=True)) <= 3
    # Every layer keeps the keys of the chunk that it came from.
    origin = np.repeat(np.arange(arrangement.num_chunks), np.diff(arrangement.cuts))
    at = np.repeat(np.arange(made.num_chunks), np.diff(made.cuts))
    assert (moved.keys[:, at] == rule.keys[:, origin]).all()
