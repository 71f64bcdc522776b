"""Search from a uniform setting: sound, within memory, and far ahead of a lean start where memory is tight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InfeasibleError
from pipeloom.search import Budget, solve
from pipeloom.search.budget import Stretch
from pipeloom.search.context import begin
from pipeloom.search.local import portfolio
from pipeloom.search.state import Search
from pipeloom.search.uniform import downhill
from pipeloom.timeline import check
from pipeloom_instances import family, generate


@pytest.mark.parametrize("memory", [1.2, 2.0, None])
@pytest.mark.parametrize("seed", [0, 1])
def test_sound_and_never_behind_plain_settings(memory: float | None, seed: int) -> None:
    of = family("vlm-s", num_ranks=3, num_microbatches=8, memory=memory, strategies=True)
    graph = generate(of, seed)
    found = solve(graph, budget=Budget(evaluations=600), seed=seed)
    assert check(graph, found.schedule, found.timeline) == ()
    assert found.timeline.makespan_ns >= found.lower_bound.ns
    assert found.schedule.candidate is not None
    if graph.capacity_bytes is None:
        return
    assert (found.timeline.peak_bytes <= graph.capacity_bytes).all()
    for setting in range(len(graph.candidates[0])):
        single = graph.with_candidates(np.full(graph.num_pairs, setting))
        try:
            plain = solve(single, budget=Budget(evaluations=1), seed=seed)
        except InfeasibleError:
            continue
        # Probes go downhill only, so a setting beyond a ridge may be missed, but not by much.
        assert found.timeline.makespan_ns <= 1.02 * plain.timeline.makespan_ns


@given(st.lists(st.one_of(st.integers(0, 9), st.just(float("inf"))), min_size=1, max_size=8))
def test_walk_ends_where_both_neighbors_are_no_better(times: list[float]) -> None:
    asked: list[int] = []

    def makespan(setting: int) -> float:
        asked.append(setting)
        return times[setting]

    found = downhill(list(range(len(times))), makespan)
    assert len(asked) == len(set(asked))
    if found is None:
        assert all(t == float("inf") for t in times[len(times) // 2 :])
        return
    around = times[max(0, found - 1) : found + 2]
    assert times[found] == min(around) < float("inf")


def test_static_orders_go_on_where_they_stopped() -> None:
    """Asked in pieces, the portfolio tries what it tries at once, and nothing twice."""
    graph = generate(family("vlm-s", num_ranks=3, num_microbatches=8, memory=2.0), 0)
    whole, pieces = (Search(graph, begin(Budget(evaluations=1000))) for _ in range(2))
    portfolio(whole)
    for _ in range(40):
        portfolio(pieces, Stretch(0.0, (pieces.meter.used + 7) / 1000))
    assert pieces.meter.used == whole.meter.used < 250
    assert pieces.best_ns == whole.best_ns
