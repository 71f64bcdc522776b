"""Packing and order decided together: sound on random problems, near the best of all packings on tiny ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeloom.errors import InfeasibleError, InputError
from pipeloom.packing import PackingSpec, budget_tokens, packing_of
from pipeloom.packing.choices import walk
from pipeloom.packing.pack import MICROBATCHES_PER_RANK
from pipeloom.planner import PlanningProblem, joint, plan_batch
from pipeloom.planner.joint import PackingSearch, ordered
from pipeloom.search import Budget
from pipeloom.spec import Batch, Sample
from pipeloom.taskgraph.iteration import MemoryLimit
from pipeloom.timeline import check
from pipeloom.tuning import TuningSpec
from tests.cases import random_batch
from tests.planner.cases import random_problem, with_costs
from tests.planner.test_strategies import offering, tight


def with_times(problem: PlanningProblem, fixed_s: float, per_token_s: float) -> PlanningProblem:
    """The same problem where every layer costs so much for a pass, and for a token."""
    profile = problem.profile_costs.profile
    layers = {
        key: msgspec.structs.replace(
            fit, forward_s=(fixed_s, 0, per_token_s, 0), backward_s=(2 * fixed_s, 0, 2 * per_token_s, 0)
        )
        for key, fit in profile.layers.items()
    }
    return with_costs(problem, profile=msgspec.structs.replace(profile, layers=layers))


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to divide items into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.booleans(), st.integers(1, 60))
def test_what_is_planned_together_is_sound(seed: int, everywhere: bool, evaluations: int) -> None:
    problem, batch = random_problem(seed, everywhere=everywhere), random_batch(seed)
    planned = plan_batch(problem, batch, budget=Budget(evaluations=evaluations))
    assert sorted(i for m in planned.packing.microbatches for i in m.samples) == list(range(len(batch.samples)))
    tokens = budget_tokens(batch, problem.model)
    assert max(tokens[list(m.samples)].sum() for m in planned.packing.microbatches) <= problem.packing.token_budget
    assert check(planned.graph, planned.schedule, planned.timeline) == ()
    again = plan_batch(problem, batch, budget=Budget(evaluations=evaluations))
    assert again.plan == planned.plan


@pytest.mark.full
@settings(deadline=None, max_examples=3)
@given(st.integers(0, 250).map(lambda number: 4 * number))
@example(208)  # Twice what its first plans lack leaves no order at all.
def test_under_a_tight_cap_with_every_strategy(seed: int) -> None:
    batch, problem = random_batch(seed), tight(seed, random_batch(seed))
    assert problem.packing.policy == "planned"
    planned = plan_batch(problem, batch, budget=Budget(evaluations=40))
    assert check(planned.graph, planned.schedule, planned.timeline) == ()


def test_near_the_best_of_all_packings() -> None:
    """Of five samples there are 52 packings; each is searched as long as all of ours."""
    above = []
    for seed in range(8):
        problem, batch = random_problem(seed), random_batch(seed, num_samples=5)
        tokens = budget_tokens(batch, problem.model)
        best = min(
            ordered(problem, packing_of(batch, problem.model, problem.layout, groups), Budget(evaluations=60)).ns
            for partition in partitions(list(range(5)))
            if all(tokens[group].sum() <= problem.packing.token_budget for group in partition)
            for groups in [tuple(map(tuple, partition))]
        )
        above.append(plan_batch(problem, batch, budget=Budget(evaluations=200)).timeline.makespan_ns / best - 1)
    assert max(above) < 0.12
    assert median(above) < 0.03


def test_the_number_of_microbatches_follows_the_costs() -> None:
    """Passes that cost much by themselves want few microbatches, tokens that do want many."""
    base = replace(random_problem(3), packing=PackingSpec(1000))
    batch = Batch(tuple(Sample(f"s{i}", 10) for i in range(32)))
    assert base.layout.num_ranks > 1

    def number(problem: PlanningProblem) -> int:
        return len(plan_batch(problem, batch, budget=Budget(evaluations=100)).packing.microbatches)

    few, many = number(with_times(base, 1e-2, 1e-6)), number(with_times(base, 1e-6, 1e-3))
    assert few < 2 * base.layout.num_ranks < many


def test_microbatches_shrink_until_they_fit() -> None:
    """Under one that no microbatch of the largest size fits into, a smaller one is found."""
    batch = Batch(tuple(Sample(f"s{i}", 10) for i in range(16)))
    offered = with_costs(offering(2), strategies=("keep",), split_backward=False)
    problem = replace(offered, packing=PackingSpec(160))
    whole = replace(problem, packing=PackingSpec(160, "first_fit"))
    capacity = int(plan_batch(whole, batch, budget=Budget(evaluations=1)).timeline.peak_bytes.max())
    memory = MemoryLimit(capacity // 2)
    with pytest.raises(InfeasibleError):
        plan_batch(replace(whole, memory=memory), batch, budget=Budget(evaluations=1))
    planned = plan_batch(replace(problem, memory=memory), batch, budget=Budget(evaluations=1))
    assert len(planned.packing.microbatches) > 1
    hopeless = replace(problem, memory=MemoryLimit(1))
    with pytest.raises(InfeasibleError, match="rank"):
        plan_batch(hopeless, batch, budget=Budget(evaluations=1))


def test_sizes_that_are_asked_for_are_kept_with_any_layout() -> None:
    problem, batch = random_problem(3), Batch(tuple(Sample(f"s{i}", 10) for i in range(16)))
    problem = replace(problem, packing=PackingSpec(40))

    def sizes(tuning: TuningSpec) -> set[int]:
        planned = plan_batch(replace(problem, tuning=tuning), batch, budget=Budget(evaluations=40))
        return {10 * len(m.samples) for m in planned.packing.microbatches}

    assert sizes(TuningSpec(micro_batch="fixed", pack="first_fit")) == {40}
    assert sizes(TuningSpec(micro_batch="multiples", pack="first_fit", unit_tokens=20)) in ({20}, {40})


def test_a_sample_above_the_budget_is_named() -> None:
    problem = replace(random_problem(1), packing=PackingSpec(5))
    batch = Batch((Sample("a", 3), Sample("long", 9)))
    with pytest.raises(InputError, match=r"batch\.samples\[1\] \('long'\): 9 tokens exceed the token budget of 5"):
        plan_batch(problem, batch, budget=Budget(evaluations=1))


@given(st.lists(st.floats(1, 10), min_size=1, max_size=12, unique=True), st.integers(0, 12))
def test_a_walk_ends_after_misses_both_ways(seconds: list[float], start: int) -> None:
    asked: list[int] = []

    def judge(rung: int) -> float:
        asked.append(rung)
        return seconds[rung]

    walk(range(len(seconds)), start, 1.0, 2, judge)
    assert asked[0] == min(start, len(seconds) - 1)
    assert len(set(asked)) == len(asked)
    for edge, step in ((max(asked), 1), (min(asked), -1)):
        ended = not 0 <= edge + step < len(seconds)
        before = [seconds[i] for i in asked[: asked.index(edge)]]
        assert ended or edge == asked[0] or seconds[edge] > min(before)
    few: list[int] = []
    walk(range(len(seconds)), start, 1.0, 2, lambda rung: few.append(rung))
    assert len(few) == 1


def test_threads_search_together() -> None:
    problem, batch = replace(random_problem(3), threads=2), random_batch(3)
    planned = plan_batch(problem, batch, budget=Budget(evaluations=60))
    assert check(planned.graph, planned.schedule, planned.timeline) == ()
    with pytest.raises(InputError, match=r"planner\.threads: -1 is not finite and at least 0"):
        replace(problem, threads=-1)


@given(st.integers(0, 1000))
@settings(deadline=None, max_examples=5)
def test_the_graph_of_a_packing_is_made_once(seed: int) -> None:
    """Costs and graphs are most of what a large batch's plan takes; a search goes on with the one that was judged."""
    problem, batch = random_problem(seed).whole_backwards(), random_batch(seed)
    graph_of, judge = joint._graph, PackingSearch.judge
    made, judged = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "_graph", lambda *given: made.append(given) or graph_of(*given))
        patch.setattr(PackingSearch, "judge", lambda *given: judged.append(given) or judge(*given))
        joint.decide(problem, batch, Budget(evaluations=60))
    # One more for the recurrence's own plan.
    assert 0 < len(made) <= len(judged) + (problem.pipeline is not None)


def test_no_more_is_judged_than_there_is_time_to_search() -> None:
    judged = {1e9: 0, 1.0: 0}
    for seed in range(3):
        problem, batch = random_problem(seed, everywhere=True), random_batch(seed)
        for searching in judged:
            packings = msgspec.structs.replace(problem.search.packings, searching=searching)
            search = msgspec.structs.replace(problem.search, packings=packings)
            found = PackingSearch(replace(problem, search=search), batch, Budget(seconds=1e3))
            found.try_numbers()
            judged[searching] += len(found.judged)
    assert judged[1e9] == 3 < judged[1.0]


def test_sizes_are_tried_while_the_budget_lasts() -> None:
    problem, batch = random_problem(3), Batch(tuple(Sample(f"s{i}", 10) for i in range(16)))
    problem = replace(problem, packing=PackingSpec(80), tuning=TuningSpec(micro_batch="multiples"))
    judged = {}
    for evaluations in (1, 1000):
        found = PackingSearch(problem, batch, Budget(evaluations=evaluations))
        found.try_numbers()
        judged[evaluations] = [len(packing.microbatches) for packing, _ in found.bounds]
    assert sorted(judged[1000]) != judged[1000]
    usual = MICROBATCHES_PER_RANK * problem.layout.num_ranks
    assert judged[1] == [min(judged[1000], key=lambda number: abs(number - usual))]


def test_an_estimate_has_the_configured_number_of_microbatches() -> None:
    problem, batch = random_problem(3), Batch(tuple(Sample(f"s{i}", 10) for i in range(16)))
    number = MICROBATCHES_PER_RANK * problem.layout.num_ranks + 3
    problem = replace(problem, packing=PackingSpec(160, num_microbatches=number))
    found = PackingSearch(problem, batch, Budget(evaluations=1))
    assert found.estimate() < float("inf")
    assert [len(each.result.packing.microbatches) for each in found.judged] == [number]


@pytest.mark.parametrize("seed", range(3))
def test_packings_are_compared_between_their_bounds_and_static_orders(seed: int) -> None:
    problem, batch = random_problem(seed, everywhere=True), random_batch(seed)
    found = PackingSearch(problem, batch, Budget(evaluations=200))
    found.try_numbers()
    for each in found.judged:
        assert each.expected_ns == (each.result.ns + each.result.lower_bound.ns) / 2
