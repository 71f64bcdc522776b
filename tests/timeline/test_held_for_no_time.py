"""What a rank holds for no time counts against its memory, as it does when the schedule runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule, check, simulate
from tests.strategies import graphs, random_order
from tests.timeline.test_simulate import tiny


def test_an_instant_beyond_the_capacity_is_a_violation() -> None:
    graph = tiny(
        num_ranks=1,
        rank=[0, 0, 0, 0],
        duration_ns=[0, 0, 0, 0],
        activation_bytes=[60, 60],
        segment=[0, 1, 3, 2],
        microbatch=[0, 1, 1, 0],
        edge_source=[],
        edge_target=[],
        edge_delay_ns=[],
        static_bytes=[0],
        capacity_bytes=[100],
    )
    schedule = Schedule((np.array([0, 1, 2, 3]),))
    assert simulate(graph, schedule).peak_bytes.tolist() == [120]
    assert [fault.kind for fault in check(graph, schedule)] == ["memory"]
    one_by_one = Schedule((np.array([0, 3, 1, 2]),))
    assert simulate(graph, one_by_one).peak_bytes.tolist() == [60]
    assert check(graph, one_by_one) == ()


@given(graphs(), st.integers(0, 2**31))
def test_a_schedule_fits_exactly_where_its_peak_does(graph: TaskGraph, seed: int) -> None:
    rng = np.random.default_rng(seed)
    if graph.candidates is not None:
        graph = replace(graph, candidates=None)
    graph = replace(graph, duration_ns=graph.duration_ns * rng.integers(0, 2, graph.num_tasks))
    schedule = random_order(graph, rng)
    peak = simulate(graph, schedule).peak_bytes
    for less in (0, 1):
        limited = replace(graph, capacity_bytes=np.maximum(peak - less, 0))
        fits = not any(fault.kind == "memory" for fault in check(limited, schedule))
        assert fits == bool((peak <= limited.capacity_bytes).all())
