from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeloom.errors import InputError
from pipeloom.timeline import Schedule, Timeline, check, require_feasible, simulate
from tests.strategies import graphs, random_order, reference_simulation
from tests.timeline.test_simulate import tiny

GOOD = Schedule((np.array([0, 3]), np.array([1, 2])))


def kinds(found):
    return {violation.kind for violation in found}


@given(graphs(), st.integers(0, 2**31))
def test_agrees_with_the_reference_on_memory_and_times(graph, seed):
    schedule = random_order(graph, np.random.default_rng(seed))
    _, peaks = reference_simulation(graph, schedule)
    over = [
        r for r in range(graph.num_ranks) if graph.capacity_bytes is not None and peaks[r] > graph.capacity_bytes[r]
    ]
    found = check(graph, schedule, simulate(graph, schedule))
    assert kinds(found) <= {"memory"}
    assert [v.message.split()[1] for v in found] == [str(r) for r in over]
    assert found == check(graph, schedule)


@given(graphs(num_candidates=0), st.integers(0, 2**31), st.sampled_from([0.3, 1.0]))
def test_the_peak_of_a_simulation_is_what_the_checker_counts(graph, seed, share):
    """Also where tasks take no time: what they hold for a moment does not count."""
    rng = np.random.default_rng(seed)
    instant = rng.random(graph.num_tasks) < share
    graph = replace(graph, duration_ns=np.where(instant, 0, graph.duration_ns))
    schedule = random_order(graph, rng)
    peaks = simulate(graph, schedule).peak_bytes
    assert "memory" not in kinds(check(replace(graph, capacity_bytes=peaks), schedule))
    rank = int(rng.integers(graph.num_ranks))
    assume(peaks[rank] > graph.static_bytes[rank])
    less = np.where(np.arange(graph.num_ranks) == rank, peaks - 1, peaks)
    found = [
        violation for violation in check(replace(graph, capacity_bytes=less), schedule) if violation.kind == "memory"
    ]
    assert [violation.message.split()[1] for violation in found] == [str(rank)]


@given(graphs(memory=None, num_candidates=0), st.integers(0, 2**31))
def test_agrees_with_the_reference_on_deadlock(graph, seed):
    rng = np.random.default_rng(seed)
    order = random_order(graph, rng).order
    rank = int(rng.integers(0, graph.num_ranks))
    swapped = Schedule(tuple(rng.permutation(tasks) if r == rank else tasks for r, tasks in enumerate(order)))
    expected = set() if reference_simulation(graph, swapped) else {"order"}
    assert kinds(check(graph, swapped)) == expected


@given(graphs(memory=None), st.integers(0, 2**31), st.integers(2, 10**6))
def test_a_moved_start_is_found(graph, seed, shift):
    rng = np.random.default_rng(seed)
    schedule = random_order(graph, rng)
    timeline = simulate(graph, schedule)
    task = int(rng.integers(0, graph.num_tasks))
    shift += graph.num_tasks
    sign = int(rng.choice([-1, 1]))
    start, end = timeline.start_ns.copy(), timeline.end_ns.copy()
    start[task] += sign * shift
    end[task] += sign * shift
    found = check(graph, schedule, Timeline(start, end))
    assert found
    assert any(f"task {task} " in violation.message for violation in found)


@given(graphs(memory=None), st.integers(0, 2**31))
def test_rounding_by_a_nanosecond_per_task_on_the_path_is_allowed(graph, seed):
    """What a file with other rounding gives: durations off by less than a nanosecond each."""
    rng = np.random.default_rng(seed)
    schedule = random_order(graph, rng)
    chosen = graph.with_candidates(schedule.candidate)
    assume((chosen.duration_ns > 0).all())
    real = replace(
        chosen,
        duration_ns=chosen.duration_ns * 1000 + rng.integers(-400, 400, graph.num_tasks),
        edge_delay_ns=chosen.edge_delay_ns * 1000,
        predecessor_delay_ns=chosen.predecessor_delay_ns * 1000,
        successor_delay_ns=chosen.successor_delay_ns * 1000,
    )
    fine = simulate(real, Schedule(schedule.order))
    rounded = Timeline(np.round(fine.start_ns / 1000).astype(np.int64), np.round(fine.end_ns / 1000).astype(np.int64))
    assert check(graph, schedule, rounded) == ()


@pytest.mark.parametrize(
    ("order", "kind", "message"),
    [
        (([0, 3], [1]), "missing task", "task 2 (B of lm, microbatch 0, rank 1) is not in the order"),
        (([0, 3, 3], [1, 2]), "doubled task", "rank 0) is in the order 2 times, not once"),
        (([0], [1, 2, 3]), "wrong rank", "task 3 (B of lm, microbatch 0, rank 0) is listed on rank 1"),
        (([0, 3], [1, 2, 9]), "missing task", "order[1] has task 9, not in 0..3"),
        (([0, 3],), "wrong rank", "order has 1 ranks, not 2"),
        (([3, 0], [1, 2]), "order", "rank 0 stops at task 3"),
        (([0, 3], [2, 1]), "order", "rank 1 stops at task 2"),
    ],
)
def test_listing_and_order(order, kind, message):
    found = check(tiny(), Schedule(tuple(np.array(tasks) for tasks in order)))
    assert (kind, True) in {(v.kind, message in v.message) for v in found}
    with pytest.raises(InputError, match=kind):
        require_feasible(tiny(), Schedule(tuple(np.array(tasks) for tasks in order)))


def shifted(**starts):
    timeline = simulate(tiny(), GOOD)
    start = timeline.start_ns.copy()
    for name, at in starts.items():
        start[int(name[1:])] = at
    return Timeline(start, start + tiny().duration_ns)


@pytest.mark.parametrize(
    ("timeline", "kind", "message"),
    [
        (shifted(t1=1_005_000_000), "edge", "allows it from 1.010000000 s (its end plus 0.010000000 s)"),
        (shifted(t2=1_500_000_000), "overlap", "rank 1) starts at 1.500000000 s, task 1"),
        (shifted(t3=5_000_000_000), "start", "starts at 5.000000000 s, its earliest start is 4.020000000 s"),
        (shifted(t0=5_500_000_000, t3=0), "order", "is listed after task 0"),
        (shifted(t0=-5), "start", "before 0 s"),
        (Timeline(np.zeros(3, np.int64), np.zeros(3, np.int64)), "start", "start_s has 3 entries, tasks 4"),
    ],
)
def test_times_that_came_with_it(timeline, kind, message):
    found = check(tiny(), GOOD, timeline)
    assert (kind, True) in {(v.kind, message in v.message) for v in found}


def test_memory_names_rank_value_and_bound():
    (found,) = check(tiny(capacity_bytes=[49, 100]), GOOD)
    assert found.kind == "memory"
    assert "rank 0 holds 50 bytes" in found.message
    assert "pair 0" in found.message
    assert "capacity is 49" in found.message


@settings(deadline=None, max_examples=20)
@given(graphs(num_candidates=3))
def test_candidates(graph):
    schedule = random_order(graph, np.random.default_rng(0))
    assert kinds(check(graph, replace(schedule, candidate=None))) == {"candidate"}
    wrong = schedule.candidate.copy()
    wrong[-1] = 7
    (found,) = check(graph, replace(schedule, candidate=wrong))
    assert f"pair {graph.num_pairs - 1} has candidate 7" in found.message
    assert kinds(check(graph, replace(schedule, candidate=wrong[:-1]))) == {"candidate"}


def test_candidates_where_there_are_none():
    assert kinds(check(tiny(), replace(GOOD, candidate=np.array([0, 0])))) == {"candidate"}
