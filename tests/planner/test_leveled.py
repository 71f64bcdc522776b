"""Search from a uniform setting: sound, within memory, and far ahead of a lean start where memory is tight."""

from __future__ import annotations

import numpy as np
import pytest

from pipeloom.errors import InfeasibleError
from pipeloom.planner.leveled import part_of, solve_from_levels
from pipeloom.search import Both, Deadline, Evaluations, family, generate, solve
from pipeloom.timeline import check


@pytest.mark.parametrize("memory", [1.2, 2.0, None])
@pytest.mark.parametrize("seed", [0, 1])
def test_sound_and_never_behind_plain_settings(memory: float | None, seed: int) -> None:
    of = family("vlm-s", num_ranks=3, num_microbatches=8, memory=memory, strategies=True)
    graph = generate(of, seed)
    found = solve_from_levels(graph, budget=Evaluations(600), seed=seed)
    assert check(graph, found.schedule, found.timeline) == ()
    assert found.timeline.makespan_ns >= found.lower_bound.ns
    assert found.schedule.candidate is not None
    if graph.capacity_bytes is None:
        return
    assert (found.timeline.peak_bytes <= graph.capacity_bytes).all()
    for level in range(len(graph.candidates[0])):
        single = graph.with_candidates(np.full(graph.num_pairs, level))
        try:
            plain = solve(single, budget=Evaluations(1), seed=seed)
        except InfeasibleError:
            continue
        # Probes go downhill only, so a setting beyond a ridge may be missed, but not by much.
        assert found.timeline.makespan_ns <= 1.02 * plain.timeline.makespan_ns


def test_without_candidates_it_is_the_plain_search() -> None:
    graph = generate(family("uniform", num_ranks=2, num_microbatches=3), 0)
    found = solve_from_levels(graph, budget=Evaluations(30), seed=0)
    assert found.timeline.makespan_ns == solve(graph, budget=Evaluations(30), seed=0).timeline.makespan_ns


def test_parts_of_budgets() -> None:
    assert part_of(Deadline(2.0, "cpu"), 0.25) == Deadline(0.5, "cpu")
    assert part_of(Evaluations(10), 0.01) == Evaluations(1)
    assert part_of(Both(Deadline(1.0), Evaluations(10)), 0.5) == Both(Deadline(0.5), Evaluations(5))
