"""The bound over all placements against every schedule there is of tiny chains."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost.layers import LayerCost, LayerTable
from pipeloom.layout.cooptimize import LayerChain, chain_of_layers, placement_bound

from .chains import table

MOST_TRIED = 3000


def chain_of(
    forward: list[int], backward: list[int], weight: list[int], num_ranks: int, num_microbatches: int, delay: int
) -> LayerChain:
    """A chain without a memory limit; times in ns."""
    layers = tuple(
        LayerCost(f"layer.{i}", f * 1e-9, 1, 0, backward_input_s=b * 1e-9, backward_weight_s=w * 1e-9)
        for i, (f, b, w) in enumerate(zip(forward, backward, weight, strict=True))
    )
    return chain_of_layers(LayerTable("tiny", num_ranks, num_microbatches, delay * 1e-9, 0, layers), split=True)


def any_faster(chain: LayerChain, home: tuple[int, ...], limit: int) -> bool:
    """Whether single layers on these ranks can end before ``limit``, updates included, in any order of tasks.

    Microbatches are alike, so each layer takes them in their order. Tasks are added by their starts, all that could
    come next are tried, and what a rank has left to do ends most attempts early. Gives up after many.
    """
    n, m = chain.num_layers, chain.num_microbatches
    times = [table[:, 0].tolist() for table in (chain.forward_ns, chain.backward_ns, chain.weight_ns)]
    ends: list[list[list[int]]] = [[[] for _ in range(n)] for _ in range(3)]
    free = [0] * chain.num_ranks
    left = [0] * chain.num_ranks
    update = [
        sum(ns for ns, rank in zip(chain.end_ns.tolist(), home, strict=True) if rank == r) for r in range(len(left))
    ]
    for kind, layer in product(range(3), range(n)):
        left[home[layer]] += times[kind][layer] * m

    def ready(kind: int, layer: int, i: int) -> int | None:
        if (kind, layer) == (0, 0):
            return 0
        before = layer if kind == 2 else layer - 1 if kind == 0 else layer + 1
        source = 1 if kind == 2 else kind
        if kind == 1 and layer == n - 1:
            source, before = 0, layer
        if len(ends[source][before]) <= i:
            return None
        return ends[source][before][i] + (chain.delay_ns if home[before] != home[layer] else 0)

    tried = 0

    def search(now: int, count: int) -> bool:
        nonlocal tried
        tried += 1
        if tried > MOST_TRIED:
            return False
        if any((max(free[r], now) if left[r] else free[r]) + left[r] + update[r] >= limit for r in range(len(free))):
            return False
        if count == 3 * n * m:
            return True
        for kind, layer in product(range(3), range(n)):
            i, r = len(ends[kind][layer]), home[layer]
            at = ready(kind, layer, i) if i < m else None
            if at is None or max(at, free[r]) < now:
                continue
            start, kept = max(at, free[r]), free[r]
            if start + times[kind][layer] >= limit:
                continue
            free[r] = start + times[kind][layer]
            ends[kind][layer].append(free[r])
            left[r] -= times[kind][layer]
            if search(start, count + 1):
                return True
            left[r] += times[kind][layer]
            ends[kind][layer].pop()
            free[r] = kept
        return False

    return search(0, 0)


@st.composite
def tiny_chains(draw: st.DrawFn) -> LayerChain:
    n = draw(st.integers(2, 4))
    m = draw(st.integers(1, 2 if n == 4 else 3))
    # The integer program is loose for times of some ns.
    unit = draw(st.sampled_from([1, 10**6]))
    times = st.integers(1, 9).map(lambda time: unit * time)
    forward, backward = (draw(st.lists(times, min_size=n, max_size=n)) for _ in range(2))
    split = draw(st.booleans()) and m < 3
    weight = [unit * time for time in draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))] if split else [0] * n
    update = draw(st.lists(st.integers(0, 20), min_size=n, max_size=n)) if draw(st.booleans()) else [0] * n
    chain = chain_of(forward, backward, weight, draw(st.integers(2, 3)), m, unit * draw(st.sampled_from([0, 2])))
    return replace(chain, update_ns=unit * np.array(update, np.int64))


@settings(deadline=None, max_examples=40)
@given(tiny_chains())
def test_no_schedule_of_any_placement_is_below_the_bound(chain: LayerChain) -> None:
    bound = placement_bound(chain).ns
    for home in product(range(chain.num_ranks), repeat=chain.num_layers):
        if home[0] == 0:
            assert not any_faster(chain, home, bound)


def test_a_slow_first_layer_keeps_the_later_ranks_waiting() -> None:
    # Three ranks are busy at once from 8 on at the earliest, when the third microbatch begins, not from 4 + 1 on; at
    # the end all is quick. Two ranks from 4 on: (4 * 12 + 4 + 8 + 1 + 2) / 3 = 21.
    chain = chain_of([4, 1, 1], [1, 1, 4], [0, 0, 0], 3, 4, 0)
    assert placement_bound(chain).name == "mean work and ends"
    assert placement_bound(chain).ns == 21


@pytest.mark.parametrize(("update", "least"), [([0, 0], 1 + 24 + 5), ([0, 9], 1 + 24 + 9), ([9, 9], 1 + 24 + 5 + 9)])
def test_updates_of_a_rank_follow_its_last_task(update: list[int], least: int) -> None:
    """On two ranks with one layer each, the second begins at 1 and works for 4 * 6; then the first has 5 left."""
    ms = 10**6
    chain = chain_of([ms, ms], [5 * ms, 5 * ms], [0, 0], 2, 4, 0)
    chain = replace(chain, update_ns=ms * np.array(update))
    assert placement_bound(chain).ns == least * ms
    assert placement_bound(chain.with_capacity(4)).ns == least * ms
    assert not any_faster(chain, (0, 1), least * ms)
    assert any_faster(chain, (0, 1), least * ms + 1)


def test_the_search_would_notice_a_bound_that_is_too_high() -> None:
    chain = chain_of([1, 1], [2, 2], [0, 0], 2, 2, 0)
    # Two microbatches through two stages: 1F1B takes 3 + 3 * 2.
    assert not any_faster(chain, (0, 1), 9)
    assert any_faster(chain, (0, 1), 10)
    assert np.array_equal(chain.weight_ns, np.zeros((2, 1)))


@pytest.mark.parametrize("capacity", [7, 10**6, 10**13, 10**15, 10**16, 10**18, 2**60])
@pytest.mark.parametrize("seed", [1, 2, 5])
def test_capacities_far_from_what_layers_hold_are_bounds_too(seed: int, capacity: int) -> None:
    """The solver takes no coefficients below 1e-9 or from 1e15 on: what is loosened for it stays true."""
    chain = chain_of_layers(table(seed, 5, 3, 4, candidates=True), split=True)
    free, tight = placement_bound(chain), placement_bound(chain.with_capacity(10))
    found = placement_bound(chain.with_capacity(capacity))
    # The less room, the more is proved; what ten bytes prove is not proved for more of them.
    assert found.ns >= free.ns
    assert capacity < 10 or found.ns <= tight.ns


def test_bytes_beyond_any_room_are_taken_by_the_solver() -> None:
    layers = tuple(
        LayerCost(f"layer.{i}", 0.003, 10 ** (i % 3 * 7), 0, backward_s=0.005, static_bytes=10 ** (i % 2 * 16))
        for i in range(6)
    )
    given = LayerTable("wide", 3, 4, 0.0, 0, layers, memory_capacity_bytes=(100, 10**3, 10**2))
    assert placement_bound(chain_of_layers(given)).ns > 0
