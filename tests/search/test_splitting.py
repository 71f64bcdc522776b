from __future__ import annotations

import numpy as np
import pytest

from pipeloom.search import Budget, alternate, solve, strategies
from pipeloom.search.restricted import restrict_splits, split_counts, splittable
from pipeloom.taskgraph import NO_TASK
from pipeloom.timeline import Schedule, check, simulate
from pipeloom_instances import family, generate, instance
from tests.strategies import Shape, random_graph


@pytest.mark.parametrize("name", ["uniform-4x16-may-split/0", "vlm-s-may-split/0", "vlm-s-ckpt-may-split-m2/0"])
def test_a_few_splits_are_better_than_none_and_all(name):
    graph = instance(name)
    budget = Budget(evaluations=3000)
    found = solve(graph, budget=budget, seed=0)
    assert check(graph, found.schedule, found.timeline) == ()
    chosen = np.array([row[c].weight_ns > 0 for row, c in zip(graph.candidates, found.schedule.candidate, strict=True)])
    assert 0 < chosen.mean() < 0.6
    for share in (np.zeros(graph.num_pairs, np.bool_), np.ones(graph.num_pairs, np.bool_)):
        inner = restrict_splits(graph, share).graph.with_candidates(np.zeros(graph.num_pairs, np.int64))
        assert found.timeline.makespan_ns < solve(inner, budget=budget, seed=0).timeline.makespan_ns


def test_restricted_schedules_mean_the_same_in_the_full_graph():
    rng = np.random.default_rng(0)
    graph = instance("uniform-4x16-may-split/0")
    for _ in range(5):
        share = rng.random(graph.num_pairs) < 0.5
        restricted = restrict_splits(graph, share)
        assert all(len(row) == 1 for row in restricted.graph.candidates)
        found = solve(restricted.graph.with_candidates([0] * graph.num_pairs), budget=Budget(evaluations=5), seed=0)
        inner = Schedule(found.schedule.order, np.zeros(graph.num_pairs, np.int64))
        outer = restricted.schedule(inner)
        assert simulate(graph, outer).makespan_ns == found.timeline.makespan_ns
        assert (outer.candidate == np.where(share, 0, 1)).all()


def test_only_pairs_with_both_forms_are_splittable():
    graph = random_graph(3, Shape(num_candidates=3, split="some", num_microbatches=3))
    assert not splittable(graph).any()
    assert not splittable(random_graph(3, Shape(num_microbatches=3))).any()
    both = instance("uniform-4x16-may-split/0")
    assert splittable(both).all()
    assert (both.weight_of != NO_TASK).all()


def test_counts_begin_with_none_and_never_repeat():
    for name in ("uniform-4x16-may-split/0", "vlm-s-may-split/0", "tiny-vlm-m1/0"):
        graph = instance(name)
        counts = split_counts(graph)
        assert counts[0] == 0
        assert len(set(counts)) == len(counts)
        assert max(counts) == len(np.unique(graph.microbatch))


def test_a_slow_choice_of_strategies_leaves_time_for_splits(monkeypatch):
    """The first choice took the most rounds, and more than the share of the budget in which splits are tried."""
    graph = generate(family("vlm-s", num_microbatches=6, split=True, split_price=0.05), 0)
    now, tried, choose = [0.0], [], strategies.choose_rank

    def choose_slowly(*arguments):
        now[0] += arguments[-1] * 4.0 / (16 * graph.num_ranks)
        return choose(*arguments)

    def restricted(*arguments):
        tried.append(None)
        return restrict_splits(*arguments)

    monkeypatch.setattr(strategies, "choose_rank", choose_slowly)
    monkeypatch.setattr(alternate, "restrict_splits", restricted)
    found = solve(graph, budget=Budget(seconds=100.0, evaluations=20_000, clock=lambda: now[0]), seed=0)
    assert check(graph, found.schedule) == ()
    assert len(tried) > 1
