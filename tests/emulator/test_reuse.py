"""Reuse equals no reuse exactly, over random nested subgraphs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.emulator.kernels import issue
from pipeloom.emulator.subgraph import INPUT, Call, Composite, Leaf, Port
from pipeloom.errors import InputError
from tests.emulator.expand import expand


@st.composite
def leaves(draw, num_devices=None, num_inputs=None):
    d = draw(st.integers(1, 3)) if num_devices is None else num_devices
    i = draw(st.integers(1, 2)) if num_inputs is None else num_inputs
    n = draw(st.integers(1, 5))
    before = [draw(st.lists(st.integers(-i, k - 1), max_size=3, unique=True)) for k in range(n)]
    start = np.cumsum([0, *map(len, before)])
    return Leaf(
        num_devices=d,
        num_inputs=i,
        device=np.array([draw(st.integers(0, d - 1)) for _ in range(n)]),
        duration_ps=np.array([draw(st.integers(0, 50)) for _ in range(n)]),
        predecessor_start=start.astype(np.int64),
        predecessor=np.array([p for b in before for p in b], np.int64),
        outputs=np.array([draw(st.integers(-i, n - 1)) for _ in range(i)]),
        collective=np.array([draw(st.booleans()) for _ in range(n)]),
    )


@st.composite
def calls(draw, pool, num_devices, num_inputs, count):
    made = []
    for number in range(count):
        usable = [g for g in pool if g.num_devices <= num_devices]
        graph = draw(st.sampled_from(usable))
        ports = [Port(INPUT, i) for i in range(num_inputs)]
        ports += [Port(c, p) for c in range(number) for p in range(made[c].graph.num_outputs)]
        inputs = tuple(
            tuple(draw(st.lists(st.sampled_from(ports), max_size=2, unique=True))) if ports else ()
            for _ in range(graph.num_inputs)
        )
        devices = tuple(draw(st.permutations(range(num_devices)))[: graph.num_devices])
        made.append(
            Call(
                graph,
                devices,
                inputs,
                repeat=draw(st.sampled_from([1, 1, 2, 5])),
                replicas=draw(st.sampled_from([1, 3])),
            )
        )
    return made


@st.composite
def composites(draw, pool):
    d, i = draw(st.integers(max(g.num_devices for g in pool), 4)), draw(st.integers(1, 2))
    made = draw(calls(pool, d, i, draw(st.integers(1, 4))))
    ports = [Port(INPUT, k) for k in range(i)]
    ports += [Port(c, p) for c, call in enumerate(made) for p in range(call.graph.num_outputs)]
    return Composite(d, i, tuple(made), tuple(draw(st.sampled_from(ports)) for _ in range(i)))


@st.composite
def nested(draw):
    pool = [draw(leaves()) for _ in range(2)]
    inner = draw(composites(pool))
    return draw(composites([*pool, inner]))


def run_flat(graph, free, ready):
    """Device and output times of a subgraph written out and timed operator by operator."""
    flat = expand(graph)
    state = np.zeros(flat.num_devices, np.int64)
    state[: len(free)] = free
    end = issue(flat.device, flat.predecessor_start, flat.predecessor, flat.duration_ps, state, np.array(ready))
    outputs = [ready[-1 - o] if o < 0 else int(end[o]) for o in flat.outputs]
    return [*state[: graph.num_devices].tolist(), *outputs]


@given(nested(), st.data())
def test_reused_times_equal_those_written_out(graph, data):
    free = [data.draw(st.integers(0, 100)) for _ in range(graph.num_devices)]
    ready = [data.draw(st.integers(0, 100)) for _ in range(graph.num_inputs)]
    state = np.array([*free, *ready])
    reused = [int(max(0, (row + state).max())) for row in graph.matrix]
    assert reused == run_flat(graph, free, ready)


def test_ports_must_name_earlier_calls():
    leaf = Leaf(1, 1, np.array([0]), np.array([1]), np.array([0, 1]), np.array([-1]), np.array([0]))
    with pytest.raises(InputError, match="edges follow the issue order"):
        Composite(1, 0, (Call(leaf, (0,), ((Port(1),),)),), ())
    with pytest.raises(InputError, match="are not all below 1"):
        Composite(1, 0, (Call(leaf, (1,), ((),)),), ())
