"""Layouts for slow ranks, on random models, batches and ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost import Correction
from pipeloom.errors import InfeasibleError
from pipeloom.layout import encoder_first, partition_chain
from pipeloom.layout.choose import LayoutDraft, LayoutEvaluation, LayoutProblem, evaluate_layout
from pipeloom.layout.slow_ranks import evened, layer_seconds, rank_seconds, rebalanced, relaid, shifted
from pipeloom.layout.training import Preview
from pipeloom.planner import PlanningProblem
from pipeloom.search import Budget
from pipeloom.taskgraph.iteration import MemoryLimit
from tests.cases import random_batch
from tests.planner.cases import random_problem


def preview(problem: PlanningProblem, slowness: tuple[float, ...]) -> Preview:
    costs = problem.costs.corrected(Correction(slowness=slowness))
    return Preview(costs, problem.packing, [random_batch(0), random_batch(1)], problem.layout.num_ranks)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_a_chain_is_cut_for_slow_parts_as_well_as_can_be(loads: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(loads)))
    slowness = data.draw(st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0]), min_size=parts, max_size=parts))

    def largest(cuts: tuple[int, ...]) -> float:
        edges = pairwise((0, *cuts, len(loads)))
        return max(slow * sum(loads[a:b]) for slow, (a, b) in zip(slowness, edges, strict=True))

    def all_cuts(first: int, count: int) -> list[tuple[int, ...]]:
        if count == 0:
            return [()]
        return [(cut, *rest) for cut in range(first, len(loads)) for rest in all_cuts(cut + 1, count - 1)]

    runs = partition_chain(loads, parts, slowness)
    assert largest(tuple(first for first, _ in runs[1:])) == min(map(largest, all_cuts(1, parts - 1)))


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10_000), st.booleans(), st.booleans(), st.sampled_from([1.2, 1.5, 2.0]))
def test_a_new_layout_is_planned_no_slower_and_has_all_layers(
    seed: int, everywhere: bool, first: bool, slow: float
) -> None:
    problem = random_problem(seed, everywhere=everywhere)
    layout = problem.layout
    if first:
        layout = encoder_first(problem.model, layout.num_ranks, problem.profile_costs.profile.load)
    rank = seed % layout.num_ranks
    seen = preview(problem, tuple(slow if each == rank else 1.0 for each in range(layout.num_ranks)))
    few = Budget(evaluations=10)
    found = relaid([seen], layout, trial=few, seed=seed)
    assert found == relaid([seen], layout, trial=few, seed=seed)
    assert found.gain >= 0
    best = found.best.layout
    assert [(c.module, c.rank) for c in best.chunks] == [(c.module, c.rank) for c in layout.chunks]
    assert best.modules == layout.modules
    # As two replicas that are alike.
    assert relaid([seen, seen], layout, trial=few, seed=seed).best.seconds <= found.before.seconds * (1 + 1e-12)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_what_ranks_compute_is_evened_out(seed: int, everywhere: bool) -> None:
    problem, rng = random_problem(seed, everywhere=everywhere), random.Random(seed)
    layout = problem.layout
    slowness = [rng.choice([1.0, 1.5, 2.0]) for _ in range(layout.num_ranks)]
    seconds = layer_seconds([preview(problem, ())], layout)
    before, after = (max(rank_seconds(made, seconds, slowness)) for made in (layout, evened(layout, seconds, slowness)))
    assert after <= before
    # Work is neither lost nor done before it is there: all ranks together, as if they never waited, are no later.
    total = sum(map(sum, seconds.values()))
    assert after >= total / sum(1 / slow for slow in slowness) * (1 - 1e-9)
    if layout.num_ranks > 1:
        assert len({made.chunks for made in shifted(layout)}) == len(list(shifted(layout)))
        assert rebalanced(layout, seconds, slowness).modules == layout.modules


@pytest.mark.full
def test_several_slow_ranks_of_many_gain_what_arithmetic_says() -> None:
    gains = []
    for seed in range(400):
        problem = random_problem(seed)
        if problem.layout.num_ranks == 4 and len(problem.model.module("lm").flat_layers) > 9:
            slow = (1.0, 2.0, 1.0, 1.0)
            gains.append(relaid([preview(problem, slow)], problem.layout, trial=Budget(evaluations=10)).gain)
    assert len(gains) >= 5
    assert sorted(gains)[len(gains) // 2] > 0.02


def test_a_layout_that_does_not_fit_is_refused() -> None:
    problem = random_problem(5)
    tight = replace(problem, memory=MemoryLimit(1))
    seen = Preview(tight.costs, tight.packing, [random_batch(0)], tight.layout.num_ranks, capacity_bytes=1)
    with pytest.raises(InfeasibleError):
        relaid([seen], tight.layout, trial=Budget(evaluations=5))


def test_a_layout_must_fit_on_every_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(5)
    layout, few = problem.layout, Budget(evaluations=5)
    seen = preview(problem, ())
    with pytest.raises(InfeasibleError, match=r"\w"):
        relaid([seen, replace(seen, capacity_bytes=1)], layout, trial=few)

    def evaluated(sampled: LayoutProblem, draft: LayoutDraft, *rest: Any) -> LayoutEvaluation:
        found = evaluate_layout(sampled, draft, *rest)
        return found if draft.layout == layout else replace(found, seconds=float("inf"), problem="too large")

    monkeypatch.setattr("pipeloom.layout.slow_ranks.evaluate_layout", evaluated)
    found = relaid([seen, seen], layout, others=list(shifted(layout)), trial=few)
    assert found.best is found.before
