from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.errors import ExecutionError
from pipeloom.runtime import ThreadHub, emulate, step_durations
from pipeloom.runtime.execute.result import ActionTime
from pipeloom.runtime.measure.emulation import Emulation, replayed_ns, run_on_ranks, without_delays
from pipeloom.timeline import simulate
from pipeloom.totals import to_ns
from tests.plan.cases import Case, RandomCosts, random_case


def emulated(case: Case, **options: Any) -> list[tuple[ActionTime, ...]]:
    hub = ThreadHub("in order", timeout_s=20.0)
    chosen = case.graph.with_candidates(case.schedule.candidate)
    durations = step_durations(chosen, case.layout.chunk_names)
    found: dict[int, tuple[ActionTime, ...]] = {}

    def work(rank: int) -> None:
        found[rank] = emulate(case.plan, rank, durations, hub.transport(rank), **options)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(case.layout.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(case.layout.num_ranks)]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 8))
def test_the_virtual_clock_gives_the_planned_times_exactly(seed: int, num_ranks: int) -> None:
    case = random_case(seed, num_ranks)
    delay_ns = to_ns(RandomCosts(seed, False).transfer_s(8))
    for order, times in zip(case.schedule.order, emulated(case, transfer_ns=lambda _: delay_ns), strict=True):
        assert [t.start_ns for t in times] == case.timeline.start_ns[order].tolist()
        assert [t.end_ns for t in times] == case.timeline.end_ns[order].tolist()


def test_sleeping_chunks_sleep() -> None:
    case = random_case(3, 2)
    for order, times in zip(case.schedule.order, emulated(case, clock="sleep"), strict=True):
        planned = case.graph.with_candidates(case.schedule.candidate).duration_ns[order].tolist()
        assert all(t.end_ns - t.start_ns >= duration for t, duration in zip(times, planned, strict=True))
        assert [t.verb for t in times] == [case.graph.task(t).kind for t in order.tolist()]


def test_an_unknown_task_is_named() -> None:
    case = random_case(3, 1)
    with pytest.raises(ExecutionError, match="no task for F"):
        emulate(case.plan, 0, {}, ThreadHub().transport(0))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_a_replay_with_what_steps_took_is_a_simulation_with_it(seed: int, num_ranks: int) -> None:
    case = random_case(seed, num_ranks)
    names = case.layout.chunk_names
    graph = without_delays(case.graph.with_candidates(case.schedule.candidate))
    schedule = replace(case.schedule, candidate=None)
    planned = simulate(graph, schedule).makespan_ns
    assert replayed_ns(graph, schedule, names, step_durations(graph, names)) == planned
    rng = random.Random(seed)
    late = replace(graph, duration_ns=graph.duration_ns + np.array([rng.randint(0, 9) for _ in graph.kind]))
    found = replayed_ns(graph, schedule, names, step_durations(late, names))
    assert found == simulate(late, schedule).makespan_ns >= planned


def test_plans_run_on_processes() -> None:
    case = random_case(3, 2)
    graph = case.graph.with_candidates(case.schedule.candidate)
    names = case.layout.chunk_names
    durations = step_durations(graph, names)
    plain = simulate(without_delays(graph), replace(case.schedule, candidate=None)).makespan_ns
    for found in run_on_ranks([Emulation(case.plan, durations)] * 2, 2, "virtual"):
        assert found.end_ns == plain
        assert found.steps_ns == durations
