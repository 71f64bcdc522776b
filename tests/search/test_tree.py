from __future__ import annotations

import numpy as np
import pytest

from pipeloom.search import Deadline, Evaluations, family, generate, solve
from pipeloom.search.state import Search
from pipeloom.search.tree import Tokens, _next_permutation
from pipeloom.timeline import check, lower_bound


def search_of(graph):
    return Search(graph, lower_bound(graph).ns, Evaluations(10).start(), 0)


def test_sequences_keep_the_order_inside_each_chain():
    graph = generate(family("vlm-s", num_microbatches=5, segments=2), 0)
    search = search_of(graph)
    tokens, rng = Tokens(search), np.random.default_rng(0)
    groups, split = search.groups, int(search.problem.num_groups[0])
    for _ in range(20):
        order = tokens.order(rng.permutation(tokens.tokens))
        assert sorted(order[:split]) == list(range(split))
        assert sorted(order.tolist()) == list(range(len(order)))
        for microbatch in range(5):
            for half in (order[:split], order[split:]):
                firsts = groups.first[half][groups.microbatch[half] == microbatch]
                assert (np.diff(firsts) > 0).all()


def test_next_permutation_goes_through_all():
    values = np.array([0, 0, 1, 2])
    seen = {tuple(values.tolist())}
    while _next_permutation(values):
        seen.add(tuple(values.tolist()))
    assert len(seen) == 12
    assert values.tolist() == [2, 1, 0, 0]


@pytest.mark.parametrize("method", ["mcts", "mcts priority", "depth first", "random"])
def test_small_trees_are_searched_to_the_end(method):
    """Two microbatches: the tree methods stop by themselves, or with the count, at the same best."""
    graph = generate(family("vlm-s", num_microbatches=2, num_ranks=2), 4)
    best = solve(graph, budget=Evaluations(3000), seed=1, method="random").timeline.makespan_ns
    found = solve(graph, budget=Evaluations(3000), seed=0, method=method)
    assert found.timeline.makespan_ns == best
    assert found.evaluations <= 3010


def test_tree_search_improves_with_its_statistics_and_threads():
    graph = generate(family("t2v-s", num_microbatches=10), 0)
    for method in ("mcts", "mcts priority"):
        short = solve(graph, budget=Evaluations(20), seed=0, method=method)
        long = solve(graph, budget=Evaluations(1500), seed=0, method=method)
        assert long.timeline.makespan_ns < short.timeline.makespan_ns
        both = solve(graph, budget=Evaluations(500), seed=0, method=method, threads=2)
        assert check(graph, both.schedule, both.timeline) == ()


def test_the_worst_is_worse_than_first_in_first_out():
    graph = generate(family("vlm-s", num_microbatches=8), 0)
    worst = solve(graph, budget=Evaluations(200), seed=0, method="worst")
    assert check(graph, worst.schedule, worst.timeline) == ()
    assert worst.timeline.makespan_ns > solve(graph, budget=Evaluations(1), seed=0).timeline.makespan_ns


def test_local_search_beats_the_trees_at_equal_budgets():
    graph = generate(family("vlm-s", num_microbatches=16, memory=2.0), 2)
    spans = {
        method: solve(graph, budget=Evaluations(3000), seed=0, method=method).timeline.makespan_ns
        for method in ("default", "mcts", "depth first", "random")
    }
    assert spans.pop("default") < min(spans.values())


def test_deadline_holds_for_python_loops():
    graph = generate(family("vlm-s", num_microbatches=8), 0)
    for method in ("mcts", "random", "depth first", "worst"):
        assert solve(graph, budget=Deadline(0.05, clock="cpu"), seed=0, method=method).elapsed_s < 5
