"""Memory strategies and split backwards, chosen per batch under a cap, and what comes of them on their way."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost import Correction, LayerFit, StrategyFit
from pipeloom.errors import InfeasibleError, InputError, NothingFoundError
from pipeloom.explain.difference import difference
from pipeloom.explain.replay import answered_graph, timeline_of
from pipeloom.layout import encoder_first
from pipeloom.plan import Measured, Verb
from pipeloom.planner import Planner, PlanningProblem, Request, answer_of, plan_batch
from pipeloom.planner.messages import decode, encode
from pipeloom.planner.planning import PlannedBatch
from pipeloom.planner.problem_file import decode_problem, encode_problem
from pipeloom.search import Budget
from pipeloom.spec import Batch, RankSpec, Strategy
from pipeloom.taskgraph.iteration import MemoryLimit
from pipeloom.timeline import check, host_peaks
from pipeloom.timeline.options import pair_options
from pipeloom.tuning import TuningSpec
from tests.cases import random_batch
from tests.planner.cases import MemoryStore, on_cluster, random_problem, with_costs

EVERY: tuple[Strategy, ...] = ("keep", "recompute", "selective", "offload")
FEW = settings(deadline=None, max_examples=5)


def offering(seed: int, capacity_bytes: int | None = None) -> PlanningProblem:
    """A random problem in which every strategy and split backwards may be chosen."""
    problem, rng = random_problem(seed), random.Random(seed)

    def more(fit: LayerFit) -> LayerFit:
        def part(whole: tuple[float, ...], share: float) -> tuple[float, float, float, float]:
            return whole[0] * share, whole[1] * share, whole[2] * share, whole[3] * share

        kept, half = fit.activation_bytes, rng.uniform(0.3, 0.7)
        return msgspec.structs.replace(
            fit,
            strategies=StrategyFit(
                input_gradient_s=part(fit.backward_s, half),
                weight_gradient_s=part(fit.backward_s, 1 - half),
                weight_gradient_bytes=part(kept, 1.5),
                selective_forward_s=part(fit.forward_s, 1.1),
                selective_backward_s=part(fit.backward_s, 1.2),
                selective_bytes=part(kept, 0.5),
                offload_s=part(fit.forward_s, 0.2),
                load_s=part(fit.forward_s, 0.2),
                given_bytes=part(kept, 0.1),
                unsaved_bytes=(0, 0, 0, 0),
                workspace_bytes=part(kept, 0.2),
            ),
        )

    layers = {key: more(fit) for key, fit in problem.profile_costs.profile.layers.items()}
    profile = msgspec.structs.replace(problem.profile_costs.profile, layers=layers)
    problem = with_costs(problem, profile=profile, strategies=EVERY, split_backward=True)
    # Packings are compared by problems of `test_joint`, and by some of these.
    packing = problem.packing if seed % 4 == 0 else msgspec.structs.replace(problem.packing, policy="balanced")
    return replace(on_cluster(problem, RankSpec(memory_capacity_bytes=capacity_bytes)), packing=packing)


def tight(seed: int, batch: Batch, offered: tuple[Strategy, ...] = EVERY) -> PlanningProblem:
    """The same with hardly more room than the least that any plan needs."""
    least = 1000
    while True:
        problem = with_costs(offering(seed, least), strategies=offered)
        try:
            plan_batch(problem.with_search(method="portfolio"), batch, budget=Budget(evaluations=1))
        except InfeasibleError:
            least = least * 5 // 4
        else:
            return problem


@FEW
@given(st.integers(0, 10_000))
def test_what_is_chosen_fits_and_survives_its_travel(seed: int) -> None:
    batch = random_batch(seed)
    for problem in (offering(seed), tight(seed, batch)):
        assert decode_problem(encode_problem(problem)) == problem
        planned = plan_batch(problem, batch, budget=Budget(evaluations=60))
        assert check(planned.graph, planned.schedule, planned.timeline) == ()
        answer = answer_of(planned, search_s=0.0, ready_ns=0)
        back = decode(type(answer), encode(answer))
        graph = answered_graph(problem, batch, back, Correction())
        assert graph.duration_ns.tolist() == planned.resolved.graph.duration_ns.tolist()
        assert graph.activation_bytes.tolist() == planned.resolved.graph.activation_bytes.tolist()
        again = timeline_of(graph, problem, back, back.planned_start_ns)
        assert again.makespan_ns == back.planned_ns
        capacity = problem.memory.capacity_bytes
        if capacity is not None:
            assert (again.peak_bytes <= capacity).all()


def test_offering_more_refuses_nothing_that_less_would_fit() -> None:
    """Under the least limit that the others fit, offloading has no room for what is on its way, and is left out."""
    for seed in range(3):
        batch = random_batch(seed)
        problem = with_costs(tight(seed, batch, EVERY[:3]), strategies=EVERY)
        planned = plan_batch(problem, batch, budget=Budget(evaluations=20))
        assert check(planned.graph, planned.schedule, planned.timeline) == ()
        answer = answer_of(planned, search_s=0.0, ready_ns=0)
        again = answered_graph(problem, batch, decode(type(answer), encode(answer)), Correction())
        assert again.duration_ns.tolist() == planned.resolved.graph.duration_ns.tolist()


def test_the_host_has_a_limit_too() -> None:
    """What is offloaded keeps to it, as far as that fits; where nothing does, the line says so."""
    batch = random_batch(2)
    problem = with_costs(tight(2, batch, ("keep", "offload")), split_backward=False)

    def planned(host_bytes: int | None) -> tuple[int, PlannedBatch]:
        memory = replace(problem.memory, host_bytes=host_bytes)
        made = plan_batch(replace(problem, memory=memory), batch, budget=Budget(evaluations=4))
        assert check(made.graph, made.schedule, made.timeline) == ()
        return int(host_peaks(made.graph, made.schedule).max()), made

    most, _ = planned(None)
    assert most > 0
    assert planned(most)[0] <= most
    with pytest.raises(InfeasibleError):
        planned(0)


@FEW
@given(st.integers(0, 10_000))
def test_the_fallback_fits_too(seed: int) -> None:
    batch = random_batch(seed)
    problem = tight(seed, batch)
    planner = Planner(problem, MemoryStore)
    delivery = planner._fallback(Request(batch), "late")
    graph = answered_graph(problem, batch, delivery.answer, Correction())
    peaks = timeline_of(graph, problem, delivery.answer, delivery.answer.planned_start_ns).peak_bytes
    assert (peaks <= problem.memory.capacity_bytes).all()
    assert not any(a.verb in ("I", "W") for actions in delivery.answer.plan.ranks for a in actions)


def test_a_cap_makes_pairs_lean_and_room_splits_backwards() -> None:
    batch = random_batch(7, num_samples=30)
    found = {}
    least = tight(7, batch).memory.capacity_bytes
    assert least is not None
    caps = {"roomy": None, "middling": least * 3 // 2, "tight": least}
    for name, problem in ((name, offering(7, cap)) for name, cap in caps.items()):
        planned = plan_batch(problem, batch, budget=Budget(evaluations=4000))
        assert check(planned.graph, planned.schedule, planned.timeline) == ()
        actions = [action for actions in planned.plan.ranks for action in actions]
        words = {action.strategy for action in actions if action.verb == "F"}
        found[name] = words, any(action.verb == "W" for action in actions)
    assert found["roomy"] == ({"keep"}, True)
    assert len(found["middling"][0]) > 1
    assert found["tight"][0] != {"keep"}


def test_recomputation_counts_as_computation() -> None:
    """A plan that ran as planned differs in nothing, though its recomputations are actions of their own."""
    for seed in range(4):
        batch = random_batch(seed)
        problem = tight(seed, batch)
        planned = plan_batch(problem, batch, budget=Budget(evaluations=30))
        answer = answer_of(planned, search_s=0.0, ready_ns=0)
        moments = iter(answer.planned_start_ns)
        times = []
        for actions in answer.plan.ranks:
            rows: list[tuple[int, int]] = []
            now = taken = 0
            for action in actions:
                if action.verb in (Verb.RECOMPUTE, Verb.LOAD):
                    # A nanosecond of the computation to come.
                    rows.append((now, now + 1))
                    now, taken = now + 1, taken + 1
                elif action.verb.is_compute:
                    begin, end = next(moments)
                    now = max(end, begin + taken)
                    rows.append((begin + taken, now))
                    taken = 0
                else:
                    rows.append((now, now))
            times.append(np.array(rows, np.int64).reshape(-1, 2))
        measured = Measured(tuple(times), tuple(10**15 for _ in times))
        spent = [end - start for start, end in measured.compute_ns(answer.plan)]
        assert spent == [end - start for start, end in answer.planned_start_ns]
        found = difference(problem, batch, answer, Correction(), measured)
        assert found.computation_s == pytest.approx(0.0, abs=1e-9)


def test_where_keeping_does_not_fit_others_are_named() -> None:
    batch = random_batch(3)
    # Smaller microbatches would fit; these are as large as they may be.
    problem = with_costs(tight(3, batch), strategies=("keep",))
    problem = replace(problem, packing=msgspec.structs.replace(problem.packing, policy="first_fit"))
    with pytest.raises(InfeasibleError, match="offer strategies that hold less, such as recompute"):
        plan_batch(problem, batch, budget=Budget(evaluations=1))


def only_offload(seed: int, host_bytes: int | None) -> PlanningProblem:
    problem = with_costs(offering(seed), strategies=("offload",), split_backward=False)
    return replace(problem, memory=MemoryLimit(host_bytes=host_bytes))


def test_the_host_is_limited_if_offload_is_the_only_strategy() -> None:
    batch, few = random_batch(5), Budget(evaluations=20)
    free = plan_batch(only_offload(5, None), batch, budget=few)
    most = int(host_peaks(free.graph, free.schedule).max())
    largest = int(pair_options(free.graph).host_bytes.max())
    limit = most * 4 // 5
    planned = plan_batch(only_offload(5, limit), batch, budget=few)
    assert 0 < host_peaks(planned.graph, planned.schedule).max() <= limit
    assert not check(planned.graph, planned.schedule)
    with pytest.raises(InfeasibleError):
        plan_batch(only_offload(5, largest - 1), batch, budget=few)


def test_the_host_is_limited_if_batches_are_tuned() -> None:
    batch, free = random_batch(5), only_offload(5, None)
    free = replace(free, layout=encoder_first(free.model, 2, lambda *_: 1.0), tuning=TuningSpec(order="clusters"))
    planned = plan_batch(free, batch)
    most = int(host_peaks(planned.graph, planned.schedule).max())
    planned = plan_batch(replace(free, memory=MemoryLimit(host_bytes=most)), batch)
    assert planned.graph.host_capacity_bytes is not None
    assert not check(planned.graph, planned.schedule)
    with pytest.raises(NothingFoundError, match=r"rank \d: holds .* of offloaded activations, host_capacity_bytes is"):
        plan_batch(replace(free, memory=MemoryLimit(host_bytes=most - 1)), batch)


def test_choices_are_refused_where_batches_are_tuned() -> None:
    with pytest.raises(InputError, match=r"strategies: is empty"):
        with_costs(random_problem(1), strategies=())
    with pytest.raises(
        InputError, match=r"planner.split_backward: needs a search of orders, which tuning.order = 'given' disables"
    ):
        replace(offering(1), tuning=TuningSpec(order="given"))
    # Where orders are searched, strategies are, too.
    replace(offering(1), tuning=TuningSpec())
