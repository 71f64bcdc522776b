"""Tabu search on the order of tasks: moves keep a schedule feasible and measured, and it becomes short."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeloom.compiled import kernel, pointer, pointers
from pipeloom.errors import InfeasibleError
from pipeloom.search import Budget, solve
from pipeloom.search.context import begin
from pipeloom.search.kernels import tabu as kernels
from pipeloom.search.kernels.blocks import make_blocks, measure, open_window, remeasure, replace_window, sequence_of
from pipeloom.search.kernels.codes import DEADLOCK, NEVER
from pipeloom.search.kernels.terms import Terms
from pipeloom.search.local import portfolio
from pipeloom.search.moves import estimate_block
from pipeloom.search.packed import DURATION, pack_graph
from pipeloom.search.state import Search
from pipeloom.search.tabu import Tour, tabu_search
from pipeloom.taskgraph import BACKWARD, FORWARD, Edges, Pairs, Tasks, make_graph
from pipeloom.timeline import Schedule, check, simulate
from pipeloom_instances import family, generate
from tests.strategies import graphs


@kernel
def judge(p, b, source, goal, most):
    s = pointers(b)
    return estimate_block(0 if source < goal else 1, s, source, goal, most)


@kernel
def make_move(p, b, tour, source, goal):
    kernels.move_task(pointers(b), pointer(tour.forbidden), source, goal, tour.state[kernels.NOW] + 3)
    tour.state[kernels.NOW] += 1
    return remeasure(pointers(b), source, goal)


@kernel
def undone(p, b, tour, source, goal):
    return kernels.is_forbidden(pointers(b), pointer(tour.forbidden), tour.state[kernels.NOW], source, goal)


def begun(graph, seed):
    """A graph's components one after the other, measured, and what moves them."""
    try:
        packed, _, components = pack_graph(graph)
    except InfeasibleError:
        assume(False)
    blocks = make_blocks(packed, components.order)
    tour = kernels.make_tour(blocks, int(measure(packed, blocks)), graph.num_tasks)
    return packed, blocks, tour, np.random.default_rng(seed)


@given(graphs(num_candidates=0), st.integers(0, 2**31))
def test_moves_keep_a_schedule_feasible_and_measured(graph, seed):
    packed, blocks, tour, rng = begun(graph, seed)
    for _ in range(12):
        source, goal = rng.integers(0, graph.num_tasks, 2).tolist()
        same = graph.rank[blocks.order[source]] == graph.rank[blocks.order[goal]]
        if source == goal or not same or judge(packed, blocks, source, goal, NEVER) == DEADLOCK:
            continue
        makespan = make_move(packed, blocks, tour, source, goal)
        # A neighbour's exchange is moved back by the opposite move, which is forbidden now.
        assert undone(packed, blocks, tour, goal, source)
        schedule = Schedule(tuple(np.split(blocks.order, blocks.row[1:-1])))
        timeline = simulate(graph, schedule)
        assert check(graph, schedule, timeline) == ()
        assert (makespan, blocks.start.tolist()) == (timeline.makespan_ns, timeline.start_ns.tolist())
        known = [column.copy() for column in (blocks.tail, blocks.left, blocks.released, blocks.level)]
        assert sorted(blocks.sorted.tolist()) == list(range(graph.num_tasks))
        assert measure(packed, blocks) == makespan
        for column, again in zip(known, (blocks.tail, blocks.left, blocks.released, blocks.level), strict=True):
            assert column.tolist() == again.tolist()
        sequence = sequence_of(packed, blocks)
        assert make_blocks(packed, sequence).order.tolist() == blocks.order.tolist()


@kernel
def open_some(p, b, low, high):
    return open_window(pointers(b), low, high)


@kernel
def go_back(p, b, sequence):
    return replace_window(pointers(b), sequence)


@settings(max_examples=30)
@given(graphs(num_candidates=0), st.integers(0, 2**31))
def test_moves_in_windows_leave_the_rest_as_it_is_and_measured(graph, seed):
    packed, blocks, tour, rng = begun(graph, seed)
    for _ in range(4):
        low, high = np.sort(rng.integers(0, graph.num_tasks + 1, 2)).tolist()
        if low == high:
            continue
        said = open_some(packed, blocks, low, high)
        assert_window(graph, packed, blocks, said)
        before, opened = blocks.sorted.copy(), said
        inside = blocks.place[blocks.sorted[low:high]]
        for source, goal in rng.choice(inside, (6, 2)).tolist():
            same = graph.rank[blocks.order[source]] == graph.rank[blocks.order[goal]]
            if source == goal or not same or judge(packed, blocks, source, goal, NEVER) == DEADLOCK:
                continue
            said = make_move(packed, blocks, tour, source, goal)
            assert sorted(blocks.sorted[low:high]) == sorted(before[low:high])
            assert_window(graph, packed, blocks, said)
        if rng.integers(2):
            assert go_back(packed, blocks, before) == opened
            assert blocks.sorted.tolist() == before.tolist()
            assert_window(graph, packed, blocks, opened)


def assert_window(graph, packed, blocks, said):
    """What is known of the window is what the whole says, which is not shorter and holds no byte too many."""
    low, high = blocks.window
    inside = blocks.sorted[low:high]
    whole = make_blocks(packed, blocks.sorted)
    makespan = measure(packed, whole)
    schedule = Schedule(tuple(np.split(whole.order, whole.row[1:-1])))
    timeline = simulate(graph, schedule)
    assert check(graph, schedule, timeline) == ()
    assert makespan == timeline.makespan_ns
    assert blocks.order.tolist() == whole.order.tolist()
    assert blocks.place.tolist() == whole.place.tolist()
    assert blocks.level.tolist() == whole.level.tolist()
    assert blocks.turn[blocks.sorted].tolist() == list(range(graph.num_tasks))
    assert blocks.start[blocks.sorted[:high]].tolist() == whole.start[blocks.sorted[:high]].tolist()
    assert blocks.tail[blocks.sorted[low:]].tolist() == whole.tail[blocks.sorted[low:]].tolist()
    assert blocks.released[inside].tolist() == whole.released[inside].tolist()
    assert blocks.left[inside].tolist() == whole.left[inside].tolist()
    assert said == (whole.start + packed.task[:-1, DURATION] + whole.tail)[inside].max() <= makespan


@pytest.mark.parametrize("threads", [1, 2])
def test_tabu_search_improves_the_portfolio(threads):
    graph = generate(family("vlm-s", num_microbatches=16, memory=1.5), 0)
    search = Search(graph, begin(Budget(evaluations=4000), threads=threads))
    portfolio(search)
    before = search.best_ns
    tabu_search(search)
    schedule = Schedule(search.orders())
    timeline = simulate(graph, schedule)
    assert check(graph, schedule, timeline) == ()
    assert timeline.makespan_ns == search.best_ns < 0.97 * before


@pytest.mark.parametrize(("num_microbatches", "seed", "shortest_ms"), [(4, 2, 946.065), (5, 0, 1329.253)])
def test_ranks_may_begin_with_different_microbatches(num_microbatches, seed, shortest_ms):
    """In the best schedules known (CP-SAT's) microbatches overtake each other differently on different ranks."""
    graph = generate(family("vlm-s", num_microbatches=num_microbatches, memory=1.5), seed)
    found = solve(graph, budget=Budget(evaluations=20_000), seed=0)
    assert found.timeline.makespan_ns <= 1.003e6 * shortest_ms


@pytest.mark.parametrize(("num_ranks", "width"), [(2, 106), (4, 150), (8, 212)])
def test_windows_are_the_wider_the_more_ranks_there_are(num_ranks, width):
    graph = generate(family("vlm-s", num_ranks=num_ranks, num_microbatches=32, memory=1.5), 0)
    search = Search(graph, begin(Budget(evaluations=1)))
    portfolio(search)
    tour = Tour(search, 1)
    assert tour.rules.width == width < graph.num_tasks
    tour.climb(search, Terms(0.0, 0, 2))
    assert tour.blocks.window[1] - tour.blocks.window[0] <= width


def test_tasks_without_duration_that_start_together_change_places():
    """A successor may start together with the last task of a block although no path leads from one to the other."""
    graph = make_graph(
        name="no duration",
        num_ranks=2,
        tasks=Tasks(
            kind=[FORWARD] * 5 + [BACKWARD] * 3,
            rank=[0, 0, 1, 0, 1, 1, 0, 1],
            duration_ns=[2000, 0, 0, 0, 1396, 2000, 2005, 5000],
            pair=[0, 1, 2, 3, 4, 4, 3, 2],
            pass_id=range(8),
            microbatch=[0, 0, 1, 1, 1, 1, 1, 1],
            module=[0] * 8,
            module_names=("lm",),
        ),
        pairs=Pairs(activation_bytes=[1] * 5),
        edges=Edges(source=[0, 2, 3, 5, 6], target=[1, 3, 4, 6, 7], delay_ns=[0, 0, 418, 0, 0]),
    )
    found = solve(graph, budget=Budget(evaluations=1000), seed=0)
    assert found.timeline.makespan_ns == found.lower_bound.ns
