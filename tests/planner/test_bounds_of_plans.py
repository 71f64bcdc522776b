"""A lower bound that a plan carries holds for every plan of its packing, however short the search was."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeloom.cost import LayerFit, Profile
from pipeloom.errors import InfeasibleError
from pipeloom.layout import ModulePlacement, replicated, separate
from pipeloom.packing import PackingSpec
from pipeloom.planner import PlanningProblem, plan_batch, planning
from pipeloom.planner.joint import decide, least_bound
from pipeloom.planner.planning import PlannedBatch
from pipeloom.search import Budget
from pipeloom.spec import Batch, RankSpec, Sample
from pipeloom.timeline import gap
from tests.cases import random_batch, vlm_spec
from tests.planner.cases import on_cluster, random_problem
from tests.planner.test_strategies import offering, tight


def replicated_encoder() -> PlanningProblem:
    """An encoder on both ranks that is dearer than the language model, under a fixed packing."""
    model = vlm_spec(3, 4)
    times = {"vision": 3e-5, "lm": 1e-5}

    def fit(seconds: float) -> LayerFit:
        return LayerFit((1e-4, 0, seconds, 0), (2e-4, 0, 2 * seconds, 0), (0, 0, 64, 0))

    kinds = {f"{m.name}/{layer.kind}": fit(times[m.name]) for m in model.modules for layer in m.flat_layers}
    placements = {"vision": ModulePlacement(1, 2), "lm": ModulePlacement(1)}
    layout = replicated(separate(model, 2, placements, lambda _module, _layer: 1.0), ["vision"])
    return PlanningProblem.from_profile(model, layout, Profile("example", kinds), PackingSpec(400, policy="balanced"))


def images_and_text(seed: int) -> Batch:
    """Twelve samples with up to four images each."""
    draw = random.Random(seed)
    return Batch(
        tuple(
            Sample(str(i), draw.randint(20, 100), tuple(draw.randint(5, 60) for _ in range(draw.randint(0, 4))))
            for i in range(12)
        )
    )


def check_each_other(plans: list[PlannedBatch]) -> None:
    """Of the plans of one packing, none is faster than the bound of any."""
    for one in plans:
        assert one.gap >= 0
        for other in plans:
            if one.packing == other.packing:
                assert one.lower_bound.ns <= other.timeline.makespan_ns


@pytest.mark.parametrize("seed", range(8))
def test_a_short_search_has_a_bound_of_every_assignment(seed: int) -> None:
    problem, batch = replicated_encoder(), images_and_text(seed)
    plans = [plan_batch(problem, batch, budget=Budget(evaluations=count)) for count in (1, 4, 30, 600)]
    assert len({plan.packing for plan in plans}) == 1
    check_each_other(plans)


def planned(problem: PlanningProblem, batch: Batch, counts: tuple[int, ...]) -> list[PlannedBatch]:
    plans = []
    for count in counts:
        try:
            plans.append(plan_batch(problem, batch, budget=Budget(evaluations=count)))
        except InfeasibleError:
            return plans
    return plans


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from(["planned", "balanced"]))
def test_bounds_of_random_problems_hold_for_longer_searches(seed: int, everywhere: bool, policy: str) -> None:
    problem = random_problem(seed, everywhere=everywhere)
    problem = replace(problem, packing=msgspec.structs.replace(problem.packing, policy=policy))
    check_each_other(planned(problem, random_batch(seed), (1, 8, 60)))


@pytest.mark.full
@settings(deadline=None, max_examples=8)
@example(seed=104, limited=True, policy="planned")
@example(seed=208, limited=True, policy="planned")
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from(["planned", "balanced"]))
def test_bounds_hold_where_backwards_may_be_split(seed: int, limited: bool, policy: str) -> None:
    batch = random_batch(seed)
    problem = tight(seed, batch) if limited else offering(seed)
    problem = replace(problem, packing=msgspec.structs.replace(problem.packing, policy=policy))
    check_each_other(planned(problem, batch, (1, 8, 60)))


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 10_000), st.booleans())
def test_no_packing_that_was_compared_beats_the_least_bound(seed: int, split: bool) -> None:
    problem, batch = (offering(seed) if split else random_problem(seed, everywhere=True)), random_batch(seed)
    problem = replace(problem, packing=msgspec.structs.replace(problem.packing, policy="planned"))
    short, long = (decide(problem, batch, Budget(evaluations=count)) for count in (4, 80))
    for one in (short, long):
        bound = least_bound(problem, one)
        assert bound.ns <= one.lower_bound.ns <= one.ns
        assert one.packing in [packing for packing, _ in one.judged]
        if long.packing in [packing for packing, _ in one.judged]:
            assert bound.ns <= long.ns


def test_a_plan_that_was_made_again_has_no_bounds_under_its_larger_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, batch = random_problem(1), random_batch(1)
    problem = replace(problem, packing=msgspec.structs.replace(problem.packing, policy="planned"))
    problem = on_cluster(problem, RankSpec(memory_capacity_bytes=2**40))
    once = plan_batch(problem, batch, budget=Budget(evaluations=8))
    assert once.judged
    over = iter([2**40 + 1])
    monkeypatch.setattr(planning, "peak_bytes", lambda *_: (next(over, 0),) * problem.layout.num_ranks)
    again = plan_batch(problem, batch, budget=Budget(evaluations=8))
    assert next(over, 0) == 0
    assert again.judged == ()


def test_a_makespan_below_its_bound_is_a_defect() -> None:
    assert gap(12, 10) == pytest.approx(0.2)
    assert gap(10, 10) == gap(5, 0) == 0.0
    with pytest.raises(AssertionError, match="the makespan of 9 ns is below its lower bound of 10 ns"):
        gap(9, 10)
