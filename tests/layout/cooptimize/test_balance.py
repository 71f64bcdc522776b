"""Partitions found by loads alone: what is reported is so, and nothing gets worse or lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.layout.cooptimize import LayerChain, PartitionPlacement, PriorityRule
from pipeloom.layout.cooptimize.evaluate import arrays_of
from pipeloom.layout.cooptimize.kernels.balance import Balance, exchange_layers, repartition
from pipeloom.layout.cooptimize.layer_chain import chunk_costs
from pipeloom.layout.cooptimize.rules import from_draft, to_draft
from tests.layout.cooptimize.chains import placed_chains


def fullest(chain: LayerChain, placement: PartitionPlacement) -> int:
    """Largest load of a rank, with the forwards before it and the backwards after it that nothing can fill."""
    costs = chunk_costs(chain, placement)
    work = costs.forward_ns + costs.backward_ns + costs.weight_ns
    fillable = bool(costs.weight_ns.any())
    found = []
    for rank in set(placement.ranks):
        mine = [c for c, home in enumerate(placement.ranks) if home == rank]
        first = mine[0]
        hops = sum(chain.delay_ns for c in range(first) if placement.ranks[c] != placement.ranks[c + 1])
        ends = int(costs.forward_ns[:first].sum()) + hops
        ends += 0 if fillable else int(costs.backward_ns[:first].sum())
        found.append(int(work[mine].sum()) * chain.num_microbatches + ends)
    return max(found)


@given(placed_chains(), st.integers(0, 200), st.booleans(), st.integers(1, 2**32))
def test_repartition_never_gets_worse_and_tells_the_truth(
    setting: tuple[LayerChain, PartitionPlacement, PriorityRule], steps: int, ranks_too: bool, seed: int
) -> None:
    chain, placement, rule = setting
    draft = to_draft(placement, rule, chain.num_layers)
    balance = Balance(tries=40, exchanges=100, steps=max(1, steps), hot=0.005, cold=0.0005)
    state = np.array([seed], np.uint64)
    found = repartition(draft, arrays_of(chain), balance, ranks_too, 0, state)
    made, moved = from_draft(draft)
    assert all(a < b for a, b in zip(made.cuts, made.cuts[1:], strict=False))
    assert (made.cuts[0], made.cuts[-1], made.num_chunks) == (0, chain.num_layers, placement.num_chunks)
    assert ranks_too or made.ranks == placement.ranks
    assert moved.period == rule.period
    if placement.num_chunks > 1:
        assert found == fullest(chain, made) <= fullest(chain, placement)
    if made == placement:
        assert (moved.keys == rule.keys).all()


def homes(placement: PartitionPlacement) -> list[int]:
    """Rank of every layer."""
    sizes = np.diff(placement.cuts)
    return [int(rank) for rank in np.repeat(placement.ranks, sizes)]


@given(placed_chains(), st.floats(0.8, 1.2), st.integers(0, 3), st.integers(1, 2**32))
def test_layers_change_places_only_where_every_rank_stays_below_the_limit(
    setting: tuple[LayerChain, PartitionPlacement, PriorityRule], part: float, more: int, seed: int
) -> None:
    chain, placement, rule = setting
    most = min(chain.num_layers, placement.num_chunks + more)
    draft = to_draft(placement, rule, most)
    before = draft.chunks.copy()
    balance = Balance(tries=40, exchanges=100, steps=300, hot=0.005, cold=0.0005)
    limit = int(fullest(chain, placement) * part)
    state = np.array([seed], np.uint64)
    changed = exchange_layers(draft, arrays_of(chain, most), balance, limit, state)
    if not changed:
        assert (draft.chunks == before).all()
        return
    made, moved = from_draft(draft)
    assert all(a < b for a, b in zip(made.cuts, made.cuts[1:], strict=False))
    assert (made.cuts[0], made.cuts[-1]) == (0, chain.num_layers)
    assert made.num_chunks <= most
    assert fullest(chain, made) < limit
    was, now = homes(placement), homes(made)
    assert 2 <= sum(a != b for a, b in zip(was, now, strict=True)) <= 3
    # Every layer keeps the keys of the chunk that it came from.
    origin = np.repeat(np.arange(placement.num_chunks), np.diff(placement.cuts))
    at = np.repeat(np.arange(made.num_chunks), np.diff(made.cuts))
    assert (moved.keys[:, at] == rule.keys[:, origin]).all()
