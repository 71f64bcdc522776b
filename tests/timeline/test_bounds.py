"""Lower bounds against true optima and against thousands of feasible schedules."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.taskgraph import Edges, Pairs, Tasks, make_graph, topological_order
from pipeloom.timeline import check, lower_bound, memory_changes, simulate
from pipeloom.timeline.bounds import BOUNDS
from pipeloom.timeline.bounds.bound import Bound, Facts
from pipeloom.timeline.bounds.memory import held_byte_ns
from pipeloom.timeline.options import pair_options
from pipeloom.timeline.residence import middles
from tests.chains import uniform_chain
from tests.strategies import Shape, graphs, random_graph, random_order


def optimum(graph):
    """Least makespan over every order and every candidate, by going through all of them."""
    if graph.candidates is None:
        return _optimum_of_order(graph)
    return min(
        _optimum_of_order(graph.with_candidates(choice))
        for choice in product(*(range(len(options)) for options in graph.candidates))
    )


def _optimum_of_order(graph):
    at_start, at_end = memory_changes(graph)
    capacity = graph.capacity_bytes if graph.capacity_bytes is not None else np.full(graph.num_ranks, 1 << 60)
    room = (capacity - graph.static_bytes).tolist()
    length, rank = graph.duration_ns.tolist(), graph.rank.tolist()
    before = [
        list(zip(graph.predecessor[a:b].tolist(), graph.predecessor_delay_ns[a:b].tolist(), strict=True))
        for a, b in zip(graph.predecessor_start, graph.predecessor_start[1:], strict=False)
    ]
    best = 1 << 60
    end: dict[int, int] = {}

    def extend(free_at, used, least_start):
        """Append tasks in the order of their starts, so that each schedule is met once."""
        nonlocal best
        if len(end) == graph.num_tasks:
            best = min(best, max(end.values()))
            return
        for task in range(graph.num_tasks):
            if task in end or any(p not in end for p, _ in before[task]):
                continue
            r = rank[task]
            start = max([free_at[r], *(end[p] + d for p, d in before[task])])
            level = used[r] + int(at_start[task])
            after = level + int(at_end[task])
            if start < least_start or max(level, after) > room[r] or start + length[task] >= best:
                continue
            end[task] = start + length[task]
            extend([*free_at[:r], end[task], *free_at[r + 1 :]], [*used[:r], after, *used[r + 1 :]], start)
            del end[task]

    extend([0] * graph.num_ranks, [0] * graph.num_ranks, 0)
    return best


@given(graphs(), st.integers(0, 2**31))
def test_not_above_feasible_schedules(graph, seed):
    bound = lower_bound(graph)
    rng = np.random.default_rng(seed)
    for _ in range(8):
        schedule = random_order(graph, rng)
        if not check(graph, schedule):
            assert bound.ns <= simulate(graph, schedule).makespan_ns, bound


def small_graph(seed, split, jitter, delays, memory, num_candidates):
    """A graph of at most 10 tasks, of which the optimum is found in milliseconds; None if it has more."""
    ranks, microbatches = [(2, 2), (3, 1), (2, 1), (1, 3), (2, 2)][int(np.random.default_rng(seed).integers(0, 5))]
    shape = Shape(
        num_ranks=ranks,
        num_microbatches=microbatches,
        num_modules=1 if microbatches * ranks > 3 else 2,
        split=split,
        frozen=True,
        jitter=jitter,
        delays=delays,
        memory=memory,
        num_candidates=num_candidates,
        max_parts=1,
        longest_ns=1000 if seed % 2 else 9,
    )
    graph = random_graph(seed, shape)
    return None if graph.num_tasks > (8 if num_candidates else 10) else graph


SHAPES = (["no", "all"], [False, True], [False, True], [None, 1.0, 1.4], [0, 2])


@given(st.integers(0, 2**31), st.tuples(*map(st.sampled_from, SHAPES)))
def test_no_bound_is_above_the_optimum(seed, shape):
    if (graph := small_graph(seed, *shape)) is not None:
        least, facts = optimum(graph), Facts(graph)
        for bound in BOUNDS:
            assert bound.ns(facts) <= least, bound.name


def test_every_bound_equals_the_optimum_of_some_graph_and_is_above_none():
    """Then an error of 1 ns or 1 % would be found. The example of docs/search.md is one of the bounds."""
    bounds, tight = (*BOUNDS, _example()), set()
    for chosen in product(range(12), *SHAPES):
        if (graph := small_graph(*chosen)) is not None:
            least, facts = optimum(graph), Facts(graph)
            found = {bound.name: bound.ns(facts) for bound in bounds}
            assert max(found.values()) <= least, (chosen, found)
            tight |= {name for name, ns in found.items() if ns == least}
    weak = {bound.name for bound in bounds} - tight
    assert not weak, f"valid, but below the optimum of every graph that is tried: {weak}"


def _example() -> type[Bound]:
    page = (Path(__file__).parents[2] / "docs/search.md").read_text().partition("### Add a bound")[2]
    names: dict[str, Any] = {}
    exec(page.partition("```py\n")[2].partition("```")[0], names)
    bound: type[Bound] = names["RankLoad"]
    return bound


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (4, 8), (4, 5)])
def test_exact_on_uniform_chains(ranks, microbatches):
    bound = lower_bound(uniform_chain(ranks, microbatches, forward_ns=2, backward_ns=3))
    assert bound.ns == (microbatches + ranks - 1) * 5


def test_memory_binds_where_only_one_microbatch_fits():
    graph = uniform_chain(4, 6, forward_ns=2, backward_ns=3, activation_bytes=10, capacity_bytes=10)
    bound = lower_bound(graph)
    assert bound.name == "memory"
    assert bound.ns == 6 * 4 * 5


def test_candidates_are_weighed_against_each_other():
    """One rank, room for one lean pair: keeping costs memory, recomputing time."""
    graph = uniform_chain(2, 10, forward_ns=10, backward_ns=20, candidates=True, activation_bytes=8, capacity_bytes=8)
    all_keep = graph.with_candidates([0] * graph.num_pairs)
    all_lean = graph.with_candidates([1] * graph.num_pairs)
    assert lower_bound(graph).ns <= min(lower_bound(all_keep).ns, lower_bound(all_lean).ns)


@given(st.integers(1, 5), st.integers(1, 6), st.booleans(), st.integers(0, 2**31))
def test_fill_and_drain_see_overtaking(ranks, microbatches, delays, seed):
    """Two modules one after the other, passes of different lengths: the bound holds for random orders."""
    shape = Shape(num_ranks=ranks, num_microbatches=microbatches, num_modules=2, max_parts=3, delays=delays)
    graph = random_graph(seed, shape)
    bound, rng = lower_bound(graph), np.random.default_rng(seed)
    for _ in range(5):
        assert bound.ns <= simulate(graph, random_order(graph, rng)).makespan_ns


def test_idle_time_before_the_first_rank_reaches_the_next():
    """Rank 1 encodes for both microbatches before rank 0 can begin, and has the last backward."""
    graph = make_graph(
        name="",
        num_ranks=2,
        tasks=Tasks(
            kind=[0, *[0, 0, 1, 1] * 2, 1],
            rank=[1, *[0, 1, 1, 0] * 2, 1],
            duration_ns=[5, *[3, 3, 4, 4] * 2, 6],
            pair=[0, 1, 2, 2, 1, 3, 4, 4, 3, 0],
            pass_id=[0, 1, 1, 2, 2, 3, 3, 4, 4, 5],
            microbatch=[0] * 5 + [1] * 4 + [0],
            module=[0, *[1] * 8, 0],
            module_names=("encoder", "backbone"),
        ),
        pairs=Pairs(activation_bytes=[1] * 5, weight_gradient_bytes=None),
        edges=Edges(source=[0, 1, 2, 3, 4, 0, 5, 6, 7, 8], target=[1, 2, 3, 4, 9, 5, 6, 7, 8, 9], delay_ns=[0] * 10),
    )
    bound = lower_bound(graph)
    assert bound.name == "warm-up + work + cool-down"
    # Rank 1 waits 3 ns for the first forward and 4 ns for the last backward.
    assert bound.ns == optimum(graph) == 5 + 3 + 2 * (3 + 4) + 4 + 6


@given(graphs(num_candidates=0, memory=1.0, max_parts=3), st.integers(0, 2**31))
def test_what_is_held_is_never_less_than_claimed(graph, seed):
    """By rank, module and microbatch, for orders that may be too full: how long bytes stay needs no limit."""
    held = held_byte_ns(graph, [pair_options(graph)], graph.duration_ns)[0][:, 0]
    rng = np.random.default_rng(seed)
    forward = graph.forward_of
    group = (graph.rank[forward] * 8 + graph.module[forward]) * 64 + graph.microbatch[forward]
    for _ in range(4):
        timeline = simulate(graph, random_order(graph, rng))
        last = np.where(graph.backward_of < 0, forward, graph.backward_of)
        true = graph.activation_bytes * (timeline.end_ns[last] - timeline.start_ns[forward]).astype(float)
        has = graph.weight_of >= 0
        waiting = timeline.end_ns[graph.weight_of] - timeline.end_ns[last]
        true[has] += (graph.weight_gradient_bytes * waiting)[has]
        for one in np.unique(group):
            assert held[group == one].sum() <= true[group == one].sum() * (1 + 1e-9)


def test_parts_of_a_microbatch_wait_for_each_other():
    """One rank, two parts of 3 and 5 before a join of 1 and 2: the parts hold 10 and 30 bytes.

    Shortest time per byte last before the join, first after it: the second part, F 3 4 5, is held for 5 + 3 + 10,
    the first for 8 + 3 + 16.
    """
    graph = make_graph(
        name="",
        num_ranks=1,
        tasks=Tasks(
            kind=[0, 0, 0, 1, 1, 1],
            rank=[0] * 6,
            duration_ns=[3, 5, 1, 2, 10, 6],
            pair=[0, 1, 2, 2, 1, 0],
            pass_id=range(6),
            microbatch=[0] * 6,
            module=[0, 0, 1, 1, 0, 0],
            module_names=("parts", "join"),
        ),
        pairs=Pairs(activation_bytes=[10, 30, 1], weight_gradient_bytes=None),
        edges=Edges(source=[0, 1, 3, 3], target=[2, 2, 4, 5], delay_ns=[0] * 4),
        capacity_bytes=[100],
    )
    held = held_byte_ns(graph, [pair_options(graph)], graph.duration_ns)[0][:, 0]
    assert held.sum() == 10 * (8 + 3 + 16) + 30 * (5 + 3 + 10) + 1 * 3


def test_work_of_the_own_rank_lies_between_forward_and_backward():
    """A text whose clips lead nowhere but back: the path sees one clip, the rank must do all of them."""
    clips = 3
    graph = make_graph(
        name="",
        num_ranks=1,
        tasks=Tasks(
            kind=[0, *[0] * clips, *[1] * clips, 1],
            rank=[0] * (2 * clips + 2),
            duration_ns=[1, *[4] * clips, *[8] * clips, 2],
            pair=[0, *range(1, clips + 1), *range(1, clips + 1), 0],
            pass_id=range(2 * clips + 2),
            microbatch=[0] * (2 * clips + 2),
            module=[0, *[1] * (2 * clips), 0],
            module_names=("text", "clip"),
        ),
        pairs=Pairs(activation_bytes=[1] * (clips + 1), weight_gradient_bytes=None),
        edges=Edges(
            source=[*[0] * clips, *range(clips + 1, 2 * clips + 1)],
            target=[*range(1, clips + 1), *[2 * clips + 1] * clips],
            delay_ns=[0] * (2 * clips),
        ),
        capacity_bytes=[9],
    )
    middle = middles(graph, graph.duration_ns, topological_order(graph))
    assert middle[0] == clips * (4 + 8)


def test_candidates_that_cannot_fit_are_no_choice():
    """Keeping is faster but larger than the rank: the bound is that of the graph without it."""
    graph = uniform_chain(2, 6, forward_ns=10, backward_ns=20, candidates=True, activation_bytes=8, capacity_bytes=7)
    lean = graph.with_candidates([1] * graph.num_pairs)
    assert lean.activation_bytes.max() <= 7
    assert lower_bound(graph).ns == lower_bound(lean).ns
    free = replace(graph, capacity_bytes=np.full(2, 8))
    assert lower_bound(free).ns < lower_bound(graph).ns
