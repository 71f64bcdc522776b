"""A tabu search keeps its shortest schedules, each with another makespan, and blends lie between two orders."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.compiled import kernel
from pipeloom.search.kernels.codes import NEVER
from pipeloom.search.kernels.tabu import BLEND_PARTS, POOL_SIZE, blend, enter, make_pool


@kernel
def add(pool, order, makespan):
    enter(pool, order, makespan)


@kernel
def mix(pool, turn, blended, random):
    blend(pool, turn, blended, random)


def order_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 20))
def test_the_pool_has_the_shortest_of_different_lengths(makespans, count):
    pool = make_pool(count)
    for makespan in makespans:
        add(pool, order_of(makespan, count), makespan)
    kept = [makespan for makespan in pool.makespan.tolist() if makespan < NEVER]
    assert sorted(kept) == sorted(set(makespans))[:POOL_SIZE]
    for turn, makespan in zip(pool.turn, pool.makespan.tolist(), strict=True):
        if makespan < NEVER:
            assert turn[order_of(makespan, count)].tolist() == list(range(count))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=10), st.integers(0, 2**31), st.integers(2, 20))
def test_a_blend_keeps_what_both_orders_agree_on(makespans, seed, count):
    pool, blended = make_pool(count), np.zeros(count, np.int64)
    for makespan in makespans:
        add(pool, order_of(makespan, count), makespan)
    turn = order_of(seed, count)
    mix(pool, turn, blended, np.array([seed * 2 + 1], np.uint64))
    shares = {
        other: share
        for other in range(POOL_SIZE)
        for share in range(1, BLEND_PARTS)
        if pool.makespan[other] < NEVER and (blended == (BLEND_PARTS - share) * turn + share * pool.turn[other]).all()
    }
    assert shares
    others = pool.turn[list(shares)]
    for one in range(count):
        for two in range(count):
            if turn[one] < turn[two] and (others[:, one] < others[:, two]).all():
                assert blended[one] < blended[two]
