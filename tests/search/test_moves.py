"""A change of an order leaves an order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.compiled import kernel
from pipeloom.compiled.arrays import assign
from pipeloom.search.kernels.moves import mutate, mutate_microbatch


class Owners(NamedTuple):
    """The part of a problem that changes look at."""

    num_groups: np.ndarray
    group_microbatch: np.ndarray


@kernel
def change_often(p, order, backup, random, count):
    for _ in range(count):
        assign(backup, order)
        mutate(p, order, backup, random)
        assign(backup, order)
        mutate_microbatch(p, order, backup, random)


owners = st.lists(st.integers(0, 4), max_size=12)


@given(owners.filter(bool), owners, st.integers(1, 2**40))
def test_changes_leave_every_group_where_its_half_is(forward, backward, seed):
    """Also where a microbatch has groups in one half only."""
    packed = Owners(np.array([len(forward), len(backward)]), np.array(forward + backward))
    order = np.arange(len(forward) + len(backward))
    change_often(packed, order, order.copy(), np.array([seed | 1], np.uint64), 30)
    assert sorted(order[: len(forward)]) == list(range(len(forward)))
    assert sorted(order[len(forward) :]) == list(range(len(forward), len(order)))
