from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.timeline import Schedule, Timeline, bubbles, simulate
from pipeloom.timeline.simulate import memory_changes
from tests.chains import uniform_chain
from tests.strategies import graphs, random_order


def one_forward_one_backward_by_hand(num_microbatches):
    """Two ranks: rank 1 alternates at once, rank 0 runs one forward ahead. Tasks: F0 F1 B1 B0 per microbatch."""
    first = [0]
    for m in range(num_microbatches):
        first += [4 * (m + 1)] if m + 1 < num_microbatches else []
        first += [4 * m + 3]
    second = [t for m in range(num_microbatches) for t in (4 * m + 1, 4 * m + 2)]
    return Schedule((np.array(first), np.array(second)))


@given(graphs(), st.integers(0, 2**31))
def test_causes_add_up_to_all_idle_time(graph, seed):
    schedule = random_order(graph, np.random.default_rng(seed))
    timeline = simulate(graph, schedule)
    chosen = graph.with_candidates(schedule.candidate)
    found = bubbles(chosen, timeline)
    work = np.bincount(graph.rank, weights=chosen.duration_ns, minlength=graph.num_ranks).astype(np.int64)
    assert found.idle_ns.tolist() == (timeline.makespan_ns - work).tolist()
    parts = (found.warm_up_ns, found.cool_down_ns, found.waiting_ns, found.transfer_ns, found.memory_ns, found.order_ns)
    assert all((part >= 0).all() for part in parts)
    assert 0 <= found.share < 1 or timeline.makespan_ns == 0
    if graph.capacity_bytes is None:
        assert found.memory_ns.sum() == 0


def test_two_ranks_by_hand():
    """F 1, B 2, wire 1. Rank 0: F0 at 0, F1 at 1, B0 at 6, B1 at 10; rank 1: F0 2, B0 3, F1 5, B1 6."""
    graph = uniform_chain(2, 2, delay_ns=1)
    timeline = simulate(graph, one_forward_one_backward_by_hand(2))
    assert timeline.makespan_ns == 11
    found = bubbles(graph, timeline)
    assert found.warm_up_ns.tolist() == [0, 2]
    assert found.cool_down_ns.tolist() == [0, 3]
    # Rank 0 waits from 2 to 5 for rank 1's B0 and to 6 for the wire, then has B1 at 9 instead of 8.
    assert found.waiting_ns.tolist() == [[0, 3], [0, 0]]
    assert found.transfer_ns.tolist() == [2, 0]
    assert found.share == (11 * 2 - 12) / 22


def test_full_memory_and_wasted_order_are_distinguished():
    for capacity, name in ((1, "memory_ns"), (2, "order_ns")):
        graph = uniform_chain(2, 2, capacity_bytes=capacity)
        strict = Schedule((np.array([0, 3, 4, 7]), np.array([1, 2, 5, 6])))
        found = bubbles(graph, simulate(graph, strict))
        assert getattr(found, name).tolist() == [3, 0]
        assert found.waiting_ns.tolist() == [[0, 3], [3, 0]]


def test_a_late_rank_in_a_measured_timeline():
    graph = uniform_chain(1, 1)
    measured = Timeline(np.array([0, 5]), np.array([1, 7]))
    assert bubbles(graph, measured).order_ns.tolist() == [4]


def stalled_by_definition(graph, timeline):
    """Of every rank, how long a task that was ready did not fit, and how long one that fitted was made to wait."""
    memory, order = np.zeros(graph.num_ranks, np.int64), np.zeros(graph.num_ranks, np.int64)
    ready = np.zeros(graph.num_tasks, np.int64)
    for task in range(graph.num_tasks):
        row = slice(graph.predecessor_start[task], graph.predecessor_start[task + 1])
        before = graph.predecessor[row]
        ready[task] = (timeline.end_ns[before] + graph.predecessor_delay_ns[row]).max(initial=0)
    takes, gives = memory_changes(graph)
    for rank in range(graph.num_ranks):
        tasks = np.flatnonzero(graph.rank == rank)
        tasks = tasks[np.lexsort((tasks, timeline.end_ns[tasks], timeline.start_ns[tasks]))]
        used, free = graph.static_bytes[rank], timeline.start_ns[tasks[:1]].sum()
        for place, task in enumerate(tasks):
            start = timeline.start_ns[task]
            others = [other for other in tasks[place:] if ready[other] < start]
            if start > free and others:
                capacity = None if graph.capacity_bytes is None else graph.capacity_bytes[rank]
                fits = capacity is None or any(used + takes[other] <= capacity for other in others)
                (order if fits else memory)[rank] += start - max(free, min(ready[others]))
            used, free = used + takes[task] + gives[task], max(free, timeline.end_ns[task])
    return memory.tolist(), order.tolist()


@given(graphs(), st.integers(0, 2**31), st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_what_could_have_run_instead_is_found_as_defined(graph, seed, late):
    """Also in measured times, where a task starts later than its order allows."""
    schedule = random_order(graph, np.random.default_rng(seed))
    planned, chosen = simulate(graph, schedule), graph.with_candidates(schedule.candidate)
    later = np.sort(np.resize(late, graph.num_tasks))[np.argsort(np.argsort(planned.start_ns, kind="stable"))]
    for timeline in (planned, Timeline(planned.start_ns + later, planned.end_ns + later)):
        found = bubbles(chosen, timeline)
        assert (found.memory_ns.tolist(), found.order_ns.tolist()) == stalled_by_definition(chosen, timeline)
