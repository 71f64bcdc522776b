"""List scheduling of orders by rank, graphs in reversed time, and the search that goes back and forth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeloom.errors import InfeasibleError
from pipeloom.search import Budget, solve
from pipeloom.search.budget import WHOLE
from pipeloom.search.context import begin
from pipeloom.search.justify import justify
from pipeloom.search.kernels import codes
from pipeloom.search.kernels.blocks import make_blocks, measure
from pipeloom.search.kernels.by_task import decode_by_task, make_ranks
from pipeloom.search.kernels.climb import evaluate
from pipeloom.search.local import portfolio
from pipeloom.search.packed import pack_graph
from pipeloom.search.reverse import reversed_graph
from pipeloom.search.scratch import make_scratch
from pipeloom.search.state import Search
from pipeloom.taskgraph import BACKWARD, FORWARD, Edges, Pairs, Tasks, make_graph
from pipeloom.timeline import Schedule, check, simulate
from pipeloom_instances import family, generate
from tests.strategies import graphs, random_order


def problem_of(graph):
    try:
        return pack_graph(graph)
    except InfeasibleError:
        assume(False)


def by_rank(graph, packed, order, lookahead=1, bound=codes.NEVER):
    """Makespan, starts and the schedule of an order, rank after rank."""
    made = np.zeros(graph.num_tasks, np.int64)
    ranks = make_ranks(packed)
    makespan = decode_by_task(packed, ranks, order, made, lookahead, bound, None)
    return makespan, ranks.start, Schedule(tuple(np.split(made, ranks.row[1:-1])))


@given(graphs(num_candidates=0), st.integers(0, 2**31), st.integers(1, 4), st.floats(0.5, 1.5))
def test_any_order_is_mended(graph, seed, lookahead, part):
    packed = problem_of(graph)[0]
    rng = np.random.default_rng(seed)
    order = np.lexsort((rng.permutation(graph.num_tasks), graph.rank))
    makespan, start, schedule = by_rank(graph, packed, order, lookahead)
    timeline = simulate(graph, schedule)
    assert check(graph, schedule, timeline) == ()
    assert makespan == timeline.makespan_ns
    assert start.tolist() == timeline.start_ns.tolist()
    bound = int(part * makespan)
    expected = makespan if makespan < bound else codes.ABORTED
    assert by_rank(graph, packed, order, lookahead, bound)[0] == expected


@given(graphs(num_candidates=0, memory=None), st.integers(0, 2**31))
def test_the_order_of_a_decoded_schedule_comes_back(graph, seed):
    packed, _, _ = problem_of(graph)
    scratch = make_scratch(packed)
    forward, backward = packed.num_groups
    rng = np.random.default_rng(seed)
    groups = np.concatenate([rng.permutation(forward), forward + rng.permutation(backward)])
    makespan = evaluate(packed, scratch, groups, np.array([0, 0, codes.UNLIMITED, 1]), codes.NEVER)
    sequence = scratch.sequence
    order = sequence[np.argsort(graph.rank[sequence], kind="stable")]
    again, _, schedule = by_rank(graph, packed, order)
    assert np.concatenate(schedule.order).tolist() == order.tolist()
    assert again == makespan


@given(graphs(num_candidates=0), st.integers(0, 2**31))
def test_schedules_of_the_reverse_are_mirrored_ones(graph, seed):
    reverse = reversed_graph(graph)
    assume(reverse is not None)
    schedule = random_order(reverse, np.random.default_rng(seed))
    mirrored = Schedule(tuple(order[::-1].copy() for order in schedule.order))
    allowed = {v.kind for v in check(reverse, schedule)}
    assert {v.kind for v in check(graph, mirrored)} == allowed
    if not allowed:
        assert simulate(graph, mirrored).makespan_ns == simulate(reverse, schedule).makespan_ns


def test_a_segment_with_and_without_backwards_is_reversed():
    """A forward segment over two ranks, of which only the second pair has a backward."""
    graph = make_graph(
        name="mixed",
        num_ranks=2,
        tasks=Tasks(
            kind=[FORWARD, FORWARD, BACKWARD],
            rank=[0, 1, 1],
            duration_ns=[3, 5, 7],
            pair=[0, 1, 1],
            pass_id=[0, 0, 1],
            microbatch=[0, 0, 0],
            module=[0, 0, 0],
            module_names=("lm",),
        ),
        pairs=Pairs(activation_bytes=[1, 1]),
        edges=Edges(source=[0, 1], target=[1, 2], delay_ns=[0, 0]),
    )
    reverse = reversed_graph(graph)
    assert reverse is not None
    assert reverse.kind.tolist() == [FORWARD, BACKWARD, FORWARD]
    assert len(set(reverse.pass_id.tolist())) == 3


@given(graphs(num_candidates=0))
def test_measuring_agrees_with_the_simulator(graph):
    """Of any number of ranks: the next task of a rank was once looked up in another rank's row."""
    packed, _, components = problem_of(graph)
    order = tuple(components.order[graph.rank[components.order] == r] for r in range(graph.num_ranks))
    timeline = simulate(graph, Schedule(order))
    blocks = make_blocks(packed, components.order)
    assert measure(packed, blocks) == timeline.makespan_ns
    assert blocks.start.tolist() == timeline.start_ns.tolist()


@pytest.mark.parametrize("threads", [1, 2])
def test_justification_improves_the_portfolio(threads):
    graph = generate(family("vlm-s", num_microbatches=16, memory=1.5, recompute=True), 0)
    search = Search(graph, begin(Budget(evaluations=1500), threads=threads))
    portfolio(search)
    before = search.best_ns
    justify(search, WHOLE, 0.1)
    schedule = Schedule(search.orders())
    timeline = simulate(graph, schedule)
    assert check(graph, schedule, timeline) == ()
    assert timeline.makespan_ns == search.best_ns < 0.99 * before


def test_split_backwards_are_not_reversed():
    assert reversed_graph(generate(family("uniform", split=True), 0)) is None


def test_the_default_search_is_repeatable_where_memory_is_tight():
    graph = generate(family("vlm-s", num_microbatches=12, memory=1.5, recompute=True), 1)
    first, second = (solve(graph, budget=Budget(evaluations=600), seed=3) for _ in range(2))
    assert [order.tolist() for order in first.schedule.order] == [order.tolist() for order in second.schedule.order]
