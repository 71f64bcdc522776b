"""Starts give orders of all groups or tasks, and a search tries each of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeloom.search import Budget, SearchParams, solve, starts
from pipeloom.search.context import begin
from pipeloom.search.lists import GroupPriorities, Priorities
from pipeloom.search.local import portfolio
from pipeloom.search.rule import ChunkRule, OrderRule
from pipeloom.search.starts.sorted_orders import FirstInFirstOut
from pipeloom.search.starts.start import Start
from pipeloom.search.state import Search
from pipeloom_instances import family, generate
from tests.chains import uniform_chain


def searches():
    """Graphs with modules, with a memory limit, and with one stage a rank and a rule of its layout."""
    yield Search(generate(family("t2v-s", num_microbatches=6), 0), begin(Budget(evaluations=1)))
    yield Search(generate(family("vlm-s", num_microbatches=6, memory=1.5), 0), begin(Budget(evaluations=1)))
    rule = OrderRule(tuple(ChunkRule((0, 0), rank, 0.0, -1.0, 0.0) for rank in range(3)))
    chain = uniform_chain(3, 5, forward_ns=10, backward_ns=20)
    yield Search(chain, begin(Budget(evaluations=1), params=SearchParams(rules=(rule,))))


@pytest.mark.parametrize("start", starts.STARTS, ids=lambda start: start.name)
def test_a_start_gives_every_group_or_task_once(start):
    count = 0
    for search in searches():
        for made in start.propose(search):
            count += 1
            assert sorted(made.order) == list(range(len(made.order)))
            if isinstance(made, Priorities):
                assert len(made.order) == search.graph.num_tasks
                assert np.all(np.diff(search.graph.rank[made.order]) >= 0)
            else:
                assert max(made.order[: search.packed.num_groups[0]]) == search.packed.num_groups[0] - 1
    assert count


def test_a_new_start_needs_one_line(monkeypatch):
    """The example of docs/search.md."""

    class ForwardsReversed(Start):
        name = "forwards reversed"

        @classmethod
        def propose(cls, search):
            (first,) = FirstInFirstOut.propose(search)
            num_forward = search.packed.num_groups[0]
            yield GroupPriorities(
                np.concatenate([first.order[:num_forward][::-1], first.order[num_forward:]]), first.choice
            )

    monkeypatch.setattr(starts, "STARTS", (*starts.STARTS, ForwardsReversed))
    (search, *_) = searches()
    (mine,) = ForwardsReversed.propose(search)
    assert any(np.array_equal(mine.order, made.order) for _, made in starts.starts(search))


def test_a_copy_of_a_search_tries_the_starts_that_are_left():
    graph = generate(family("vlm-s", num_microbatches=8, memory=1.5), 0)
    first = Search(graph, begin(Budget(evaluations=1000)))
    first.starts = starts.starts(first)
    first.try_order(*next(first.starts)[1])
    best = first.best_ns
    copied = first.aimed_at(0)
    portfolio(copied)
    assert copied.best_ns < best == first.best_ns


@pytest.mark.parametrize("limited", [False, True])
def test_numbers_of_microbatches_may_have_gaps(limited):
    graph = generate(family("vlm-s", num_microbatches=5, memory=1.5 if limited else None), 0)
    far = replace(graph, microbatch=graph.microbatch * 10**12 + 7)
    solutions = [solve(one, budget=Budget(evaluations=500), seed=0) for one in (graph, far)]
    assert solutions[0].timeline.makespan_ns == solutions[1].timeline.makespan_ns
    assert all(map(np.array_equal, *(found.schedule.order for found in solutions)))


def test_rules_take_numbers_of_microbatches_with_gaps():
    rule = OrderRule(tuple(ChunkRule((0, 0), rank, 0.0, -1.0, 0.0) for rank in range(3)))
    chain = uniform_chain(3, 5, forward_ns=10, backward_ns=20)
    far = replace(chain, microbatch=chain.microbatch * 10**12 + 7)
    spans = [
        solve(one, budget=Budget(evaluations=50), seed=0, params=SearchParams(rules=(rule,))).timeline.makespan_ns
        for one in (chain, far)
    ]
    assert spans[0] == spans[1]
