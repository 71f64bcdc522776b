"""A limit of host memory: what is offloaded at once never exceeds it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InfeasibleError
from pipeloom.search import Budget, solve
from pipeloom.search.plain import minimum_memory
from pipeloom.search.strategies import choose_on_rank, choose_strategies
from pipeloom.timeline import Schedule, check, host_peaks, lower_bound, memory_changes, simulate, within_limits
from pipeloom_instances import family, generate
from tests.search.test_strategies import lean_schedule
from tests.strategies import graphs, with_strategies

SMALL = {
    "num_candidates": 2,
    "num_microbatches": 2,
    "num_modules": 1,
    "max_parts": 1,
    "max_segments": 2,
    "num_ranks": 2,
}


def offloading(graph, room):
    """The graph with one more candidate of every pair: as fast as the first, with what that holds on the host."""
    rows = tuple(
        (
            *row,
            row[0]._replace(
                strategy="offload", activation_bytes=0, weight_gradient_bytes=0, host_bytes=row[0].activation_bytes
            ),
        )
        for row in graph.candidates
    )
    return replace(graph, candidates=rows, host_capacity_bytes=np.full(graph.num_ranks, room, np.int64))


def best_on_rank(graph, schedule, rank):
    """Least total time over all choices of one rank's pairs that fit on the rank and on the host."""
    pairs = [p for p in range(graph.num_pairs) if graph.rank[graph.forward_of[p]] == rank]
    best = None
    for picks in product(*(range(len(graph.candidates[p])) for p in pairs)):
        choice = np.zeros(graph.num_pairs, np.int64)
        choice[pairs] = picks
        at_start, at_end = memory_changes(graph.with_candidates(choice))
        allocated, fits = (
            0,
            host_peaks(graph, replace(schedule, candidate=choice))[rank] <= graph.host_capacity_bytes[rank],
        )
        for task in schedule.order[rank]:
            fits = fits and (graph.headroom_bytes is None or allocated + at_start[task] <= graph.headroom_bytes[rank])
            allocated += at_start[task] + at_end[task]
        if fits:
            spent = sum(sum(graph.candidates[p][j][1:4]) for p, j in zip(pairs, picks, strict=True))
            best = spent if best is None else min(best, spent)
    return best


def assert_fits_on_the_host(graph, whole, one_rank):
    """What ``whole`` chooses is feasible; on each rank it lies between the bound and the optimum."""
    try:
        schedule = lean_schedule(graph)
    except InfeasibleError:
        return
    chosen = whole(graph, schedule)
    assert check(graph, chosen) == ()
    for rank in range(graph.num_ranks):
        found = one_rank(graph, schedule, rank)
        best = best_on_rank(graph, schedule, rank)
        if best is None:
            # For the judge, a task that takes no time holds no memory; for the count it does.
            assert (graph.with_candidates(schedule.candidate).duration_ns == 0).any()
            continue
        assert found.bound_ns <= best + 1e-3
        assert best <= found.total_ns


@given(graphs(**SMALL), st.integers(0, 40))
def test_chosen_strategies_fit_on_the_host_and_are_between_bound_and_optimum(graph, room):
    assert_fits_on_the_host(offloading(graph, room), choose_strategies, choose_on_rank)


@given(graphs(**SMALL), st.integers(0, 40), st.randoms(use_true_random=False))
def test_the_judge_and_the_count_agree(graph, room, random):
    graph = offloading(graph, room)
    try:
        schedule = lean_schedule(graph)
    except InfeasibleError:
        return
    choice = np.array([random.randrange(len(row)) for row in graph.candidates])
    schedule = replace(schedule, candidate=choice)
    faults = check(replace(graph, capacity_bytes=None), schedule)
    # What lasts no time does not lie anywhere for the judge; here every task may.
    if (graph.with_candidates(choice).duration_ns > 0).all():
        assert bool(faults) == bool((host_peaks(graph, schedule) > room).any())
    assert all("on the host" in fault.message for fault in faults)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 9.0])
def test_a_search_keeps_to_the_host(share):
    """More room there is used, and never more than there is."""
    plain = with_strategies(generate(family("vlm-s", num_microbatches=8, memory=0.6, num_ranks=3), 2))
    limited = offloading(plain, int(share * plain.capacity_bytes.max()))
    found = solve(limited, budget=Budget(evaluations=400), seed=0)
    assert check(limited, found.schedule, found.timeline) == ()
    assert within_limits(limited, found.schedule, found.timeline)
    assert (host_peaks(limited, found.schedule).max() > 0) == (share > 0)
    assert (
        found.timeline.makespan_ns <= 1.02 * solve(plain, budget=Budget(evaluations=400), seed=0).timeline.makespan_ns
    )


def test_a_schedule_that_fills_the_host_is_refused_with_place_and_bytes():
    graph = offloading(with_strategies(generate(family("vlm-s", num_microbatches=2, num_ranks=2), 0)), 10)
    order = lean_schedule(graph).order
    schedule = Schedule(order, np.full(graph.num_pairs, len(graph.candidates[0]) - 1))
    assert not within_limits(graph, schedule, simulate(graph, schedule))
    assert "bytes) on the host" in str(check(graph, schedule)[0])


def staging(graph, room, staged):
    """`offloading`, with so much taken off a rank where a pair offloads; a negative room: the host has no limit."""
    made = offloading(graph, max(room, 0))
    return replace(
        made,
        host_capacity_bytes=None if room < 0 else made.host_capacity_bytes,
        staging_bytes=np.full(graph.num_ranks, staged, np.int64),
    )


def without_host(graph):
    """The graph without candidates that hold something there."""
    rows = tuple(tuple(option for option in row if not option.host_bytes) for row in graph.candidates)
    return replace(graph, candidates=rows, host_capacity_bytes=None, staging_bytes=None)


def every_choice(graph, rank):
    """Choices that differ on one rank's pairs."""
    pairs = [p for p in range(graph.num_pairs) if graph.rank[graph.forward_of[p]] == rank]
    for picks in product(*(range(len(graph.candidates[p])) for p in pairs)):
        choice = minimum_memory(graph)
        choice[pairs] = picks
        yield pairs, choice


@given(graphs(**SMALL, memory=1.0), st.integers(-1, 40), st.integers(0, 30))
def test_what_is_staged_counts_on_the_ranks_that_offload(graph, room, staged):
    """What is chosen fits, takes no longer than without offloading, and lies between bound and optimum."""
    graph = staging(graph, room, staged)
    try:
        schedule = lean_schedule(graph)
    except InfeasibleError:
        return
    chosen = choose_strategies(graph, schedule)
    assert check(graph, chosen) == ()
    plain = without_host(graph)
    for rank in range(graph.num_ranks):
        found = choose_on_rank(graph, schedule, rank)
        best = None
        for pairs, choice in every_choice(graph, rank):
            tried = replace(schedule, candidate=choice)
            if within_limits(graph, tried, simulate(graph, tried)):
                spent = sum(sum(graph.candidates[p][choice[p]][1:4]) for p in pairs)
                best = spent if best is None else min(best, spent)
        assert found.bound_ns <= best + 1e-3
        assert best <= found.total_ns
        if all(plain.candidates):
            assert found.total_ns <= choose_on_rank(plain, lean_schedule(plain), rank).total_ns


@given(graphs(**SMALL, memory=1.0), st.integers(-1, 40), st.integers(0, 30), st.randoms(use_true_random=False))
def test_judge_count_and_bound_agree_on_what_is_staged(graph, room, staged, random):
    graph = staging(graph, room, staged)
    try:
        schedule = lean_schedule(graph)
    except InfeasibleError:
        return
    bound = lower_bound(graph).ns
    for _ in range(4):
        choice = np.array([random.randrange(len(row)) for row in graph.candidates])
        tried = replace(schedule, candidate=choice)
        timeline, faults = simulate(graph, tried), check(graph, tried)
        if (graph.with_candidates(choice).duration_ns > 0).all():
            assert within_limits(graph, tried, timeline) == (not faults)
        if not faults:
            assert bound <= timeline.makespan_ns
        away = {
            int(graph.rank[graph.forward_of[p]]) for p, row in enumerate(graph.candidates) if row[choice[p]].host_bytes
        }
        left = graph.capacity_bytes - graph.with_candidates(choice).capacity_bytes
        assert left.tolist() == [staged * (rank in away) for rank in range(graph.num_ranks)]


@pytest.mark.parametrize("staged", [0.05, 0.4, 1.0])
def test_offering_to_offload_is_no_worse_than_not_to(staged):
    """Little that is staged pays, much does not: either way the search does as well as without, or better."""
    plain = with_strategies(generate(family("vlm-s", num_microbatches=8, memory=0.6, num_ranks=3), 2))
    graph = staging(plain, -1, int(staged * plain.capacity_bytes.max()) + 1)
    found = solve(graph, budget=Budget(evaluations=400), seed=0)
    assert check(graph, found.schedule, found.timeline) == ()
    without = solve(plain, budget=Budget(evaluations=400), seed=0).timeline.makespan_ns
    assert found.timeline.makespan_ns <= 1.01 * without
    away = any(row[i].host_bytes for row, i in zip(graph.candidates, found.schedule.candidate.tolist(), strict=True))
    assert away == (staged < 1.0)


def test_where_only_offloading_fits_every_rank_stages():
    """The leanest that keep off the host are too large."""
    plain = with_strategies(generate(family("vlm-s", num_microbatches=4, num_ranks=2), 0))
    rows = tuple((row[0],) for row in plain.candidates)
    most = max(row[0].activation_bytes for row in rows)
    tight = replace(plain, candidates=rows, capacity_bytes=plain.static_bytes + most - 1)
    with pytest.raises(InfeasibleError):
        solve(tight, budget=Budget(evaluations=5), seed=0)
    graph = staging(tight, -1, most // 2)
    found = solve(graph, budget=Budget(evaluations=5), seed=0)
    assert check(graph, found.schedule, found.timeline) == ()
