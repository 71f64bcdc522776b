import threading
import time
from contextlib import suppress
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.compare.batches import baseline, chain_layouts, compare_systems
from pipeloom.cost import Correction
from pipeloom.errors import InputError, PlannerError
from pipeloom.explain.replay import answered_graph, timeline_of
from pipeloom.layout import chain_of_stages, encoder_first
from pipeloom.layout.layouts import chunk_counts
from pipeloom.packing import PackingSpec
from pipeloom.planner import Planner, PlanningProblem, Request, answer_of, plan_batch, serve
from pipeloom.planner.messages import decode, encode
from pipeloom.planner.problem_file import ProblemFile, decode_problem, encode_problem
from pipeloom.planner.service import LATEST, READY, SETUP, STOP, answer_key, error_key, request_key
from pipeloom.search import Budget
from pipeloom.taskgraph.iteration import MemoryLimit
from pipeloom.timeline import check, simulate, within_limits
from pipeloom.tuning import TuningSpec, tune, tuned_plan
from tests.cases import random_batch
from tests.planner.cases import MemoryStore, random_problem


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from(((), (1.5,), (1.0, 0.8, 2.0))))
def test_a_plan_is_feasible_bounded_and_survives_its_travel(
    seed: int, everywhere: bool, slowness: tuple[float, ...]
) -> None:
    """Also where the encoder is on every rank, and the plan says which rank encodes what; and where ranks are slow."""
    problem, batch = random_problem(seed, everywhere=everywhere), random_batch(seed)
    correction = Correction(slowness=slowness)
    corrected = problem.corrected(correction)
    planned = plan_batch(corrected, batch, budget=Budget(evaluations=50))
    assert check(planned.graph, planned.schedule, planned.timeline) == ()
    assert planned.lower_bound.ns <= planned.timeline.makespan_ns
    assert planned.gap >= 0
    answer = answer_of(planned, search_s=0.0, ready_ns=0)
    back = decode(type(answer), encode(answer))
    assert back == answer
    graph = answered_graph(problem, batch, back, correction)
    again = timeline_of(graph, corrected, back, back.planned_start_ns)
    assert again.makespan_ns == planned.timeline.makespan_ns == back.planned_ns
    assert again.peak_bytes.tolist() == planned.timeline.peak_bytes.tolist()
    assert graph.rank.tolist() == planned.resolved.graph.rank.tolist()
    assert graph.edge_delay_ns.tolist() == planned.resolved.graph.edge_delay_ns.tolist()
    planned_busy = sum(sum(both) for both in back.planned_module_ns.values())
    assert planned_busy == int(graph.duration_ns.sum())


def test_the_same_request_gives_the_same_plan() -> None:
    problem, batch = random_problem(5), random_batch(5)
    first, second = (plan_batch(problem, batch, budget=Budget(evaluations=80)) for _ in range(2))
    assert first.plan == second.plan


def test_calibration_scales_what_is_planned() -> None:
    problem, batch = random_problem(7), random_batch(7)
    plain = plan_batch(problem, batch, budget=Budget(evaluations=1))
    slow = {module.name: (2.0, 2.0) for module in problem.model.modules}
    twice = plan_batch(problem.corrected(Correction(slow)), batch, budget=Budget(evaluations=1))
    assert twice.graph.duration_ns.sum() == pytest.approx(2 * plain.graph.duration_ns.sum(), rel=1e-6)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10_000))
def test_baselines_run_on_the_same_costs(seed: int) -> None:
    problem, batch = random_problem(seed), random_batch(seed)
    layouts = chain_layouts(problem, problem.profile_costs.profile.load, [batch])
    systems = compare_systems(problem, layouts, batch, budget=Budget(evaluations=30))
    assert [system.name for system in systems] == [*layouts, "per-batch plan"]
    for system in systems:
        assert check(system.graph, system.schedule) == ()
        assert simulate(system.graph, system.schedule).makespan_ns == system.timeline.makespan_ns
        assert system.lower_bound.ns <= system.timeline.makespan_ns


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.floats(0.8, 1.4))
def test_baselines_under_a_limit_are_bound_by_what_they_keep(seed: int, share: float) -> None:
    """Room for a computation counts for them as for plans; one that breaks the limit is not bound by it."""
    problem, batch = random_problem(seed), random_batch(seed)
    layout = chain_layouts(problem, problem.profile_costs.profile.load, [batch])["1f1b"]
    free = baseline(problem, "1f1b", layout, batch)
    limit = max(1, int(share * free.timeline.peak_bytes.max()))
    capped = replace(problem, memory=MemoryLimit(limit))
    found = baseline(capped, "1f1b", layout, batch)
    assert found.lower_bound.ns <= found.timeline.makespan_ns
    assert found.graph.capacity_bytes is not None
    assert (found.graph.capacity_bytes <= limit).all()


def test_the_interleaved_baseline_has_the_best_number_of_chunks() -> None:
    """Of all that there are layers for, over all batches; more than two chunks a rank are best for some."""
    more = 0
    for seed in range(8):
        problem, batches = random_problem(seed), [random_batch(seed), random_batch(seed + 100)]
        ranks, load = problem.layout.num_ranks, problem.profile_costs.profile.load
        chosen = chain_layouts(problem, load, batches).get("interleaved")
        counts = chunk_counts(ranks, problem.model.modules)[1:]
        options = [chain_of_stages(problem.model, ranks, count, load) for count in counts]
        if chosen is None:
            assert not options
            continue
        seconds = {}
        for layout in options:
            systems = [
                compare_systems(problem, {"interleaved": layout}, batch, budget=Budget(evaluations=1))[0]
                for batch in batches
            ]
            lacking = sum(not within_limits(system.graph, system.schedule, system.timeline) for system in systems)
            seconds[layout.chunks] = lacking, sum(system.iteration_s for system in systems)
        assert seconds[chosen.chunks] == min(seconds.values())
        more += len(chosen.chunks) > len(options[0].chunks)
    assert more


def test_the_service_answers_the_newest_request_and_says_why_not() -> None:
    store, problem = MemoryStore(), random_problem(11)
    store.put(SETUP, encode_problem(problem))
    batches = [msgspec.structs.replace(random_batch(i), iteration=i) for i in range(3)]
    too_long = msgspec.structs.replace(batches[2].samples[0], text_tokens=10_000)
    batches[2] = msgspec.structs.replace(batches[2], samples=(too_long,))
    store.put(request_key(0), encode(Request(batches[0])))
    store.put(request_key(1), encode(Request(batches[1])))
    store.put(LATEST, b"1")
    made: list[int] = []
    thread = threading.Thread(target=lambda: made.append(serve(store)))
    thread.start()
    wait_for(store, answer_key(1))
    assert store.peek(READY) is not None
    assert store.peek(answer_key(0)) is None, "an iteration that has begun is not planned any more"
    store.put(request_key(2), encode(Request(batches[2])))
    store.put(LATEST, b"2")
    wait_for(store, error_key(2))
    assert b"exceed the token budget" in store.values[error_key(2)]
    wait_for(store, answer_key(2))
    assert store.values[answer_key(2)] == b"", "an empty answer says that there is none"
    store.put(STOP, b"1")
    thread.join(30)
    assert made == [1]


def wait_for(store: MemoryStore, key: str) -> None:
    # The service may have to compile its kernels first.
    give_up = time.monotonic() + 600
    while store.peek(key) is None:
        assert time.monotonic() < give_up, f"no {key}"
        time.sleep(0.005)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 5000), st.binary(max_size=6))
def test_bytes_that_are_no_message_are_refused(place: int, noise: bytes) -> None:
    data = encode_problem(random_problem(1))
    place %= len(data)
    broken = data[:place] + noise + data[place + len(noise) + 1 :]
    with suppress(PlannerError):  # and no other error
        assert isinstance(decode_problem(broken), PlanningProblem)


def test_impossible_times_are_refused() -> None:
    with pytest.raises(InputError, match=r"deadline_s: -1.0 is not finite and at least 0"):
        Planner(random_problem(1), MemoryStore, deadline_s=-1.0)
    with pytest.raises(PlannerError, match=r"budget_s: 0 is not positive"):
        decode_problem(
            msgspec.msgpack.encode(msgspec.to_builtins(ProblemFile.of(random_problem(1))) | {"budget_s": 0.0})
        )


def test_tuned_batches_are_planned_and_search_never_makes_them_slower() -> None:
    for seed in range(3):
        base = random_problem(seed)
        layout = encoder_first(base.model, max(2, base.layout.num_ranks), lambda *_: 1.0)
        batch = random_batch(seed, num_samples=20)
        times = {}
        for order in ("clusters", "search"):
            tuning = TuningSpec(order=order)
            problem = replace(base, layout=layout, tuning=tuning, packing=PackingSpec(64))
            assert decode_problem(encode_problem(problem)) == problem
            planned = plan_batch(problem, batch, budget=Budget(evaluations=20))
            assert not check(planned.graph, planned.schedule, planned.timeline)
            times[order] = planned.timeline.makespan_ns
        assert times["search"] <= 1.02 * times["clusters"]
        # Calibration scales what tuning sees as it scales the graph.
        factors = {"vision": (3.0, 2.0), "lm": (0.5, 0.5)}
        problem = problem.corrected(Correction(factors))
        tuned = tune(problem.pipeline.scaled(factors), batch, 64, TuningSpec(), seed)
        plan = tuned_plan(problem.pipeline, batch, tuned, problem.costs)
        assert simulate(plan.graph, plan.schedule).makespan_ns == pytest.approx(tuned.planned_ns, rel=1e-3)
