from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeloom.compiled.stamp import files_of
from pipeloom.errors import InfeasibleError
from pipeloom.search import Budget, solve
from pipeloom.search.context import begin
from pipeloom.search.state import Search
from pipeloom.timeline import check, lower_bound, simulate
from pipeloom_instances import family, generate
from pipeloom_lab.solvers import uniform_start
from pipeloom_lab.solvers.explore import next_permutation
from pipeloom_lab.solvers.kernels import tree
from pipeloom_lab.solvers.kernels.tree import complete, make_tree, make_workspace, propagate, select
from pipeloom_lab.solvers.sequences import Sequences
from pipeloom_lab.solvers.tree import _SharedTree, _Walker
from tests.strategies import with_strategies


def search_of(graph):
    return Search(graph, begin(Budget(evaluations=10), lower_bound(graph).ns))


def test_sequences_keep_the_order_inside_each_chain():
    graph = generate(family("vlm-s", num_microbatches=5, segments=2), 0)
    search = search_of(graph)
    sequences, rng = Sequences(search), np.random.default_rng(0)
    groups, split = search.groups, int(search.packed.num_groups[0])
    for _ in range(20):
        order = sequences.order(rng.permutation(sequences.chain))
        assert sorted(order[:split]) == list(range(split))
        assert sorted(order.tolist()) == list(range(len(order)))
        for microbatch in range(5):
            for half in (order[:split], order[split:]):
                firsts = groups.first[half][groups.microbatch[half] == microbatch]
                assert (np.diff(firsts) > 0).all()


def testnext_permutation_goes_through_all():
    values = np.array([0, 0, 1, 2])
    seen = {tuple(values.tolist())}
    while next_permutation(values):
        seen.add(tuple(values.tolist()))
    assert len(seen) == 12
    assert values.tolist() == [2, 1, 0, 0]


@pytest.mark.parametrize("method", ["mcts", "mcts priority", "depth first", "random"])
def test_small_trees_are_searched_to_the_end(method):
    """Two microbatches: the tree methods stop by themselves, or with the count, at the same best."""
    graph = generate(family("vlm-s", num_microbatches=2, num_ranks=2), 4)
    best = solve(graph, budget=Budget(evaluations=3000), seed=1, method="random").timeline.makespan_ns
    found = solve(graph, budget=Budget(evaluations=3000), seed=0, method=method)
    assert found.timeline.makespan_ns == best
    assert found.evaluations <= 3010


def test_tree_search_improves_with_its_statistics_and_threads():
    graph = generate(family("t2v-s", num_microbatches=10), 0)
    for method in ("mcts", "mcts priority"):
        short = solve(graph, budget=Budget(evaluations=20), seed=0, method=method)
        long = solve(graph, budget=Budget(evaluations=1500), seed=0, method=method)
        assert long.timeline.makespan_ns < short.timeline.makespan_ns
        both = solve(graph, budget=Budget(evaluations=500), seed=0, method=method, threads=2)
        assert check(graph, both.schedule, both.timeline) == ()


def test_the_worst_is_worse_than_first_in_first_out():
    graph = generate(family("vlm-s", num_microbatches=8), 0)
    worst = solve(graph, budget=Budget(evaluations=200), seed=0, method="worst")
    assert check(graph, worst.schedule, worst.timeline) == ()
    assert worst.timeline.makespan_ns > solve(graph, budget=Budget(evaluations=1), seed=0).timeline.makespan_ns


def test_local_search_beats_the_trees_at_equal_budgets():
    graph = generate(family("vlm-s", num_microbatches=16, memory=2.0), 2)
    spans = {
        method: solve(graph, budget=Budget(evaluations=3000), seed=0, method=method).timeline.makespan_ns
        for method in ("default", "mcts", "depth first", "random")
    }
    assert spans.pop("default") < min(spans.values())


def test_deadline_holds_for_python_loops():
    graph = generate(family("vlm-s", num_microbatches=8), 0)
    for method in ("mcts", "random", "depth first", "worst"):
        assert solve(graph, budget=Budget(seconds=0.05, clock="cpu"), seed=0, method=method).elapsed_s < 5


@pytest.mark.parametrize("by_place", [True, False])
def test_completions_keep_what_the_prefix_fixes(by_place):
    graph = generate(family("t2v-s", num_microbatches=5), 3)
    sequences = Sequences(search_of(graph))
    length = len(sequences.chain)
    tree = make_tree(4000)
    workspace = make_workspace(length, len(sequences.chain_size), 5)
    orders = np.empty((4, length), np.int64)
    depths = set()
    for _ in range(3000):
        # Every node gets one child only, so that the walk goes one level deeper each time.
        depth = select(tree, workspace, sequences.chains, by_place, 1.0, 1e-9)
        tree.num_children[workspace.path[:depth]] = -1
        complete(workspace, sequences.chains, depth, by_place, orders)
        propagate(tree, workspace, depth, 0.5)
        depths.add(depth)
        prefix = workspace.prefix[:depth]
        for order in orders:
            assert sorted(order.tolist()) == list(range(length))
        if by_place:
            assert (np.bincount(prefix, minlength=len(sequences.chain_size)) <= sequences.chain_size).all()
            fixed = [g for g in orders[0] if g < sequences.num_forward]
            ahead = [c for c in prefix if sequences.groups[sequences.chain_start[c]] < sequences.num_forward]
            chain_of = dict(zip(sequences.groups.tolist(), sequences.chain.tolist(), strict=True))
            assert [chain_of[g] for g in fixed[: len(ahead)]] == ahead
        else:
            assert len(set(prefix.tolist())) == depth
            for c in range(len(sequences.chain_size)):
                places = prefix[sequences.chain[:depth] == c]
                assert (np.diff(places) > 0).all()
                assert workspace.sequence[places].tolist() == [c] * len(places)
            assert np.bincount(workspace.sequence, minlength=len(sequences.chain_size)).tolist() == (
                sequences.chain_size.tolist()
            )
        if depth == length:
            break
    assert max(depths) > 10


def test_tree_statistics_are_complete_with_threads():
    """Every step counts once at the root, whichever thread made it, and scores are those of the best below."""
    graph = generate(family("vlm-s", num_microbatches=6), 0)
    search = Search(graph, begin(Budget(evaluations=800), lower_bound(graph).ns))
    shared = _SharedTree(search, by_place=True)
    walkers = [_Walker(shared, seed) for seed in (1, 2, 3)]

    def run(walker):
        for _ in range(25):
            walker.step()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, walkers))
    tree = shared.tree
    assert tree.visits[0] == 75
    assert tree.size[0] == 76
    assert search.meter.used == 750
    assert tree.score[0] == pytest.approx(search.target_ns / search.best_ns)
    children = np.flatnonzero(tree.visits[1:76]) + 1
    assert len(children) == 75
    assert tree.score[0] == tree.score[children].max()


@pytest.mark.parametrize("method", ["mcts", "mcts priority", "mcts uniform", "depth first", "random", "worst"])
def test_strategies_are_chosen_in_every_rollout(method):
    lean = generate(family("vlm-s", num_microbatches=6, memory=1.0, num_ranks=2), 0)
    graph = with_strategies(lean)
    found = solve(graph, budget=Budget(evaluations=60), seed=0, method=method)
    assert check(graph, found.schedule, found.timeline) == ()
    assert found.lower_bound.ns <= found.timeline.makespan_ns
    assert len(set(found.schedule.candidate.tolist())) > 1
    if method != "worst":
        best = found.timeline.makespan_ns
        everyone_lean = graph.with_candidates(np.full(graph.num_pairs, 2))
        assert best < solve(everyone_lean, budget=Budget(evaluations=60), seed=0, method=method).timeline.makespan_ns


@pytest.mark.parametrize("seed", range(4))
def test_the_best_uniform_setting_is_the_best_of_all(seed):
    """As searching each setting for one schedule says; the tree search that starts from it is not behind it."""
    lean = generate(family("vlm-s", num_microbatches=6, memory=1.0, num_ranks=2), seed)
    graph = with_strategies(lean)
    best = uniform_start(graph)
    spans = []
    for level in range(3):
        single = graph.with_candidates(np.full(graph.num_pairs, level))
        with suppress(InfeasibleError):
            one = solve(single, budget=Budget(evaluations=1), seed=0, method="portfolio")
            spans.append(one.timeline.makespan_ns)
    assert best is not None
    assert check(graph, best) == ()
    assert simulate(graph, best).makespan_ns == min(spans)
    found = solve(graph, budget=Budget(evaluations=30), seed=0, method="mcts uniform")
    assert found.timeline.makespan_ns <= min(spans)
    tight = replace(graph, capacity_bytes=graph.static_bytes + 1)
    assert uniform_start(tight) is None


def test_the_stamp_of_compiled_code_covers_the_products_kernels():
    used = files_of(Path(tree.__file__))
    assert {"queues.py", "decorators.py"} <= {file.name for file in used}
