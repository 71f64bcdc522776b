"""Two chunks a rank, down and up again: cut as well as can be, and in a steady state in which no rank waits."""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.layout.cooptimize import (
    LayerChain,
    PartitionPlacement,
    chain_of_layers,
    cooptimize,
    evaluate,
    one_f_one_b_peaks,
)
from pipeloom.layout.cooptimize.cuts import folded
from pipeloom.layout.cooptimize.evaluate import arrays_of
from pipeloom.layout.cooptimize.kernels.run import NEVER
from pipeloom.layout.cooptimize.layer_chain import chunk_costs
from pipeloom.layout.cooptimize.params import TimetableParams
from pipeloom.layout.cooptimize.timetables import fitting_limits, folded_starts, steady_starts
from pipeloom.search import Budget
from pipeloom.timeline import check
from tests.layout.cooptimize.chains import table


def least_by_trying(chain: LayerChain) -> int:
    """Least largest sum of load, head and tail, of all ways to cut."""
    n, p = chain.num_layers, chain.num_ranks
    work = np.concatenate([[0], np.cumsum(chain.total_ns[:, 0])]) * chain.num_microbatches
    ends = chain.forward_ns[:, 0] + (0 if chain.weight_ns.any() else chain.backward_ns[:, 0])
    before = np.concatenate([[0], np.cumsum(ends)])
    hop = chain.delay_ns * (1 if chain.weight_ns.any() else 2)
    best = NEVER
    for cuts in combinations_with_replacement(range(n + 1), 2 * p - 2):
        down, up = (0, *cuts[: p - 1]), (*cuts[p - 1 :], n)
        if any(a == b for a, b in zip(down, (*down[1:], up[0]), strict=True)):
            continue
        first, last = (*down, up[0]), (up[0], *up)
        loads = [work[first[r + 1]] - work[down[r]] + work[up[p - 1 - r]] - work[last[p - 1 - r]] for r in range(p)]
        best = min(best, max(int(loads[r] + before[down[r]]) + r * hop for r in range(p)))
    return best


def fullest(chain: LayerChain, placement: PartitionPlacement) -> int:
    """Largest sum of load, head and tail: the first ranks are neighbours, so rank r is r boundary transfers away."""
    costs, home = chunk_costs(chain, placement), np.array(placement.ranks)
    work = (costs.forward_ns + costs.backward_ns + costs.weight_ns) * chain.num_microbatches
    ends = costs.forward_ns + (0 if chain.weight_ns.any() else costs.backward_ns)
    hop = chain.delay_ns * (1 if chain.weight_ns.any() else 2)
    return max(int(work[home == r].sum() + ends[:r].sum()) + r * hop for r in range(chain.num_ranks))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(3, 7), st.integers(1, 20), st.booleans())
def test_folded_is_the_best_fold(seed: int, num_ranks: int, num_layers: int, m: int, split: bool) -> None:
    chain = chain_of_layers(table(seed, num_layers, num_ranks, m, split=split, boundary_s=0.001), split=split)
    found = folded(chain)
    assert len(set(found.ranks)) == num_ranks
    assert found.merged() == found
    least = least_by_trying(chain)
    # To 1/100,000 of the mean load.
    assert least <= fullest(chain, found) <= least + int(chain.total_ns.sum()) * m // num_ranks // 100_000 + 1


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(6, 20), st.sampled_from([0.0, 0.001, 0.02]))
def test_a_timetable_can_be_repeated(seed: int, num_ranks: int, num_layers: int, delay: float) -> None:
    chain = chain_of_layers(table(seed, num_layers, num_ranks, 4, split=False, boundary_s=delay))
    placement = folded(chain)
    planned, period = steady_starts(chain, placement)
    costs = chunk_costs(chain, placement)
    both = np.stack([costs.forward_ns, costs.backward_ns])
    home = np.array(placement.ranks)
    hop = np.where(home[1:] != home[:-1], chain.delay_ns, 0)
    ends = planned + both
    # No message comes late, and none waits for a period.
    for waits in (
        planned[0, 1:] - ends[0, :-1] - hop,
        planned[1, :-1] - ends[1, 1:] - hop,
        planned[1, -1:] - ends[0, -1:],
    ):
        assert (waits > -1).all()
        assert (waits < period + 1).all()
    # Folded into one period, the tasks of a rank do not overlap.
    for rank in range(num_ranks):
        begin = (planned[:, home == rank] % period).ravel()
        length = both[:, home == rank].ravel()
        place = np.argsort(begin)
        begin, length = begin[place][length[place] > 0], length[place][length[place] > 0]
        assert (begin[:-1] + length[:-1] <= begin[1:] + 1).all()
        if len(begin):
            assert begin[-1] + length[-1] <= begin[0] + period + 1


def test_limits_fit_into_memory() -> None:
    chain = chain_of_layers(table(5, 24, 4, 40, split=False))
    placement = folded(chain)
    costs, home = chunk_costs(chain, placement), np.array(placement.ranks)
    wanted = np.linspace(30, 5, placement.num_chunks)
    assert (fitting_limits(chain, placement, wanted) == np.floor(wanted)).all()
    tight = chain.with_capacity(int(one_f_one_b_peaks(chain).max()))
    limits = fitting_limits(tight, placement, wanted)
    assert (limits < np.floor(wanted)).any()
    for rank in range(4):
        held = (limits * costs.activation_bytes + costs.static_bytes)[home == rank].sum()
        assert held <= tight.headroom_bytes[rank] or (limits[home == rank] == 1).all()


@pytest.mark.parametrize("memory", [None, 2])
def test_many_ranks_run_by_timetable(memory: int | None) -> None:
    # Single stages are 23 % above work per rank.
    chain = chain_of_layers(table(1, 90, 18, 120, split=False))
    if memory is not None:
        chain = chain.with_capacity(memory * int(one_f_one_b_peaks(chain).max()))
    share = int(chain.total_ns.sum()) * chain.num_microbatches / chain.num_ranks
    stride = arrays_of(chain).stride_ns
    tried = [evaluate(chain, placement, rule) for placement, rule in folded_starts(chain, stride, TimetableParams())]
    assert min(tried) < 1.2 * share
    found = cooptimize(chain, budget=Budget(evaluations=300))
    assert found.timeline.makespan_ns <= min(tried)
    assert not check(found.graph, found.schedule, found.timeline)
