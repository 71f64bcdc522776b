"""Where measured and planned time differ, on measured times that are made up so that the cause is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost import Correction
from pipeloom.explain.difference import Difference, difference, mean_difference
from pipeloom.plan import Answer, ExecutionPlan, Measured, Verb
from pipeloom.plan.messages import messages_of
from pipeloom.planner import PlanningProblem, answer_of, plan_batch
from pipeloom.search import Budget
from pipeloom.spec import Batch
from pipeloom.timeline import simulate
from tests.cases import random_batch
from tests.planner.cases import random_problem

SOME = settings(max_examples=10)


def measured_from(
    plan: ExecutionPlan, compute: list[tuple[int, int]], problem: PlanningProblem, cpu_share: float
) -> Measured:
    """Actions timed as a rank would that computes at these times, and whose messages take as long as planned."""
    sent, messages, left = {}, messages_of(plan), iter(compute)
    begins = []
    for rank, actions in enumerate(plan.ranks):
        end, rows = 0, []
        for action, message in zip(actions, messages[rank], strict=True):
            if action.verb.is_compute:
                rows.append(next(left))
                end = rows[-1][1]
                continue
            rows.append((end, end))
            if action.verb in (Verb.SEND_F, Verb.SEND_B):
                size = int(np.prod(action.shape)) * 4
                sent[message] = end + round(problem.costs.transfer_s(size) * 1e9)
        begins.append(rows)
    times, cpu = [], []
    for rank, actions in enumerate(plan.ranks):
        now, rows = 0, []
        for action, message, (begin, end) in zip(actions, messages[rank], begins[rank], strict=True):
            if action.verb.is_compute:
                rows.append((begin, end))
            elif action.verb in (Verb.WAIT_F, Verb.WAIT_B):
                rows.append((now, max(now, sent.get(message, now))))
            else:
                rows.append((now, now))
            now = rows[-1][1]
        times.append(np.array(rows, np.int64).reshape(-1, 2))
        busy = sum(end - begin for a, (begin, end) in zip(actions, rows, strict=True) if a.verb.is_compute)
        cpu.append(round(busy * cpu_share))
    return Measured(tuple(times), tuple(cpu))


def explained(
    seed: int, factor: int, cpu_share: float, learned: float = 1.0, slowness: tuple[float, ...] = ()
) -> tuple[Difference, Answer, PlanningProblem, Batch]:
    """A plan whose computation takes so many times as long as planned, with a share of a core.

    Iterations before have taught that computation takes ``learned`` times as long as profiled, and ranks' slowness.
    """
    problem, batch = random_problem(seed), random_batch(seed)
    correction = Correction({module.name: (learned, learned) for module in problem.model.modules}, slowness=slowness)
    planned = plan_batch(problem.corrected(correction), batch, budget=Budget(evaluations=5))
    answer = answer_of(planned, search_s=0.0, ready_ns=0)
    slow = replace(planned.graph, duration_ns=planned.graph.duration_ns * factor)
    timeline = simulate(slow, planned.schedule)
    order = [int(task) for tasks in planned.schedule.order for task in tasks]
    compute = [(int(timeline.start_ns[task]), int(timeline.end_ns[task])) for task in order]
    measured = measured_from(planned.plan, compute, problem, cpu_share)
    found = difference(problem, batch, answer, correction, measured)
    causes = found.computation_s + found.shared_cores_s + found.messages_s + found.rest_s
    assert found.planned_s + causes == pytest.approx(found.measured_s)
    assert found.planned_s == pytest.approx(answer.planned_ns / 1e9)
    assert found.measured_s == pytest.approx(timeline.makespan_ns / 1e9)
    return found, answer, problem, batch


@SOME
@given(st.integers(0, 10_000), st.sampled_from(((), (1.5,), (1.0, 0.7))))
def test_nothing_differs_where_all_is_as_planned(seed: int, slowness: tuple[float, ...]) -> None:
    found, answer, problem, _ = explained(seed, 1, 1.0, slowness=slowness)
    assert found.measured_s == pytest.approx(found.planned_s)
    for cause in (found.computation_s, found.shared_cores_s, found.messages_s, found.rest_s, found.posting_s):
        assert cause == pytest.approx(0.0, abs=found.planned_s * 1e-3)
    if any(action.verb == Verb.SEND_F for actions in answer.plan.ranks for action in actions):
        assert found.num_messages > 0
        assert found.message_planned_s >= problem.costs.rank.link_latency_s
    # Every second of every task is some kind's.
    total = sum(end - start for start, end in answer.planned_start_ns) / 1e9
    assert sum(k.forward_planned_s + k.backward_planned_s for k in found.kinds) == pytest.approx(total)
    assert sum(k.forward_measured_s + k.backward_measured_s for k in found.kinds) == pytest.approx(total)
    # Every idle nanosecond has its cause, and where all is as planned, the same one.
    idle = answer.bubble_share * answer.planned_ns / 1e9
    assert sum(each.planned_s for each in found.idle) == pytest.approx(idle)
    for each in found.idle:
        assert each.measured_s == pytest.approx(each.planned_s)
    assert {k.kind for k in found.kinds} <= set(problem.costs.profile.layers)


@SOME
@given(st.integers(0, 10_000))
def test_shared_cores_explain_only_what_plans_have_not_learned(seed: int) -> None:
    """They once counted twice, and layers were then said to be faster than profiled."""
    known, *_ = explained(seed, 1, 0.5, learned=2.0)
    for cause in (known.shared_cores_s, known.computation_s, known.rest_s):
        assert cause == pytest.approx(0.0, abs=known.planned_s * 1e-3)
    half, *_ = explained(seed, 2, 0.25, learned=2.0)
    assert half.shared_cores_s == pytest.approx(half.measured_s - half.planned_s, rel=1e-3)


@SOME
@given(st.integers(0, 10_000))
def test_layers_that_wait_are_not_slowed_by_shared_cores(seed: int) -> None:
    """A layer that sleeps or reads has little CPU time. Plans were then said to take a hundred times as long."""
    asleep, *_ = explained(seed, 1, 0.001)
    for cause in (asleep.shared_cores_s, asleep.computation_s, asleep.rest_s):
        assert cause == pytest.approx(0.0, abs=asleep.planned_s * 1e-3)


@SOME
@given(st.integers(0, 10_000))
def test_the_cause_is_found(seed: int) -> None:
    slower, *_ = explained(seed, 2, 1.0)
    longer = slower.measured_s - slower.planned_s
    assert slower.computation_s == pytest.approx(longer, rel=1e-3)
    for kind in slower.kinds:
        assert kind.forward_measured_s == pytest.approx(2 * kind.forward_planned_s, rel=1e-3)
    shared, *_ = explained(seed, 2, 0.5)
    assert shared.shared_cores_s == pytest.approx(longer, rel=1e-3)
    assert shared.computation_s == pytest.approx(0.0, abs=longer * 1e-3)
    # A GPU's host says nothing of what the GPU computes.
    on_gpu, *_ = explained(seed, 2, -1.0)
    assert on_gpu.computation_s == pytest.approx(longer, rel=1e-3)
    assert on_gpu.shared_cores_s == pytest.approx(0.0, abs=longer * 1e-3)
    mean = mean_difference([slower, shared])
    assert mean.iterations == 2
    for each, one, other in zip(mean.idle, slower.idle, shared.idle, strict=True):
        assert each.cause == one.cause == other.cause
        assert each.measured_s == pytest.approx((one.measured_s + other.measured_s) / 2)
    assert mean.computation_s == pytest.approx((slower.computation_s + shared.computation_s) / 2)
    assert [k.kind for k in mean.kinds] == [k.kind for k in slower.kinds]
