"""Reuse equals no reuse exactly, over random runs of operators."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.emulator.kernels import compose, issue
from pipeloom.emulator.subgraph import NUM_PORTS, Leaf
from pipeloom.emulator.tape import NUM_DEVICES
from tests.emulator.expand import Call, Flat

TIMES = st.lists(st.integers(0, 100), min_size=NUM_DEVICES, max_size=NUM_DEVICES)


@st.composite
def leaves(draw):
    n = draw(st.integers(1, 5))
    before = [draw(st.lists(st.integers(-NUM_PORTS, k - 1), max_size=3, unique=True)) for k in range(n)]
    return Leaf(
        device=np.array([draw(st.integers(0, NUM_DEVICES - 1)) for _ in range(n)]),
        duration_ps=np.array([draw(st.integers(0, 50)) for _ in range(n)]),
        predecessor_start=np.cumsum([0, *map(len, before)]),
        predecessor=np.array([p for b in before for p in b], np.int64),
        outputs=np.array([draw(st.integers(-NUM_PORTS, n - 1)) for _ in range(NUM_PORTS)]),
    )


@st.composite
def calls(draw):
    leaf = draw(leaves())
    collective = tuple(draw(st.booleans()) for _ in range(len(leaf.device)))
    return Call(leaf, draw(st.sampled_from([1, 1, 2, 5])), draw(st.sampled_from([1, 3])), collective)


@given(st.lists(calls(), min_size=1, max_size=4), TIMES, st.lists(st.integers(0, 100), min_size=2, max_size=2))
def test_reused_times_equal_those_written_out(chain, free, ready):
    matrix = chain[0].leaf.repeated(chain[0].repeat)
    for call in chain[1:]:
        matrix = compose(call.leaf.repeated(call.repeat), matrix)
    reused = (matrix + np.array([*free, *ready])).max(axis=1)
    assert np.maximum(reused, 0).tolist() == Flat(chain).run(free, ready)


@given(leaves(), TIMES, st.lists(st.integers(0, 100), min_size=2, max_size=2))
def test_operators_are_issued_by_definition(leaf, free, ready):
    state = np.array(free)
    end = issue(leaf.device, leaf.predecessor_start, leaf.predecessor, leaf.duration_ps, state, np.array(ready))
    for i, device in enumerate(leaf.device.tolist()):
        rows = leaf.predecessor[leaf.predecessor_start[i] : leaf.predecessor_start[i + 1]].tolist()
        start = max([free[device], *(ready[-1 - p] if p < 0 else int(end[p]) for p in rows)])
        free[device] = start + int(leaf.duration_ps[i])
        assert end[i] == free[device]
    assert state.tolist() == free
