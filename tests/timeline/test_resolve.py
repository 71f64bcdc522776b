"""What is left of a graph once strategies are chosen: the same times and bytes, whole backwards as one task."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.taskgraph import BACKWARD, INPUT_GRADIENT, NO_TASK, WEIGHT_GRADIENT, build_graph
from pipeloom.timeline import Schedule, check, resolve_candidates, simulate
from tests.plan.cases import RandomCosts, random_case, random_schedule


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_a_settled_graph_has_the_same_timeline(seed: int) -> None:
    case = random_case(seed)
    costs = RandomCosts(seed, True, ("keep", "recompute", "mixed"))
    graph = build_graph(case.layout, case.packing, costs, backward="either")
    schedule = random_schedule(random.Random(seed), graph)
    assert graph.candidates is not None
    assert schedule.candidate is not None
    timeline = simulate(graph, schedule)
    resolved = resolve_candidates(graph, schedule.candidate)
    again = resolved.timeline(timeline)
    assert check(resolved.graph, resolved.schedule(schedule), again) == ()
    assert again.makespan_ns == timeline.makespan_ns
    peaks = simulate(resolved.graph, resolved.schedule(schedule)).peak_bytes
    # A W of no time may have been planned late, and has held its bytes until then.
    assert (peaks <= timeline.peak_bytes).all()
    picked = [row[i] for row, i in zip(graph.candidates, schedule.candidate.tolist(), strict=True)]
    for pair, option in enumerate(picked):
        assert resolved.graph.candidates is not None
        assert resolved.graph.candidates[pair] == (option,)
        if resolved.graph.backward_of[pair] == NO_TASK:
            continue
        halves = option.weight_ns > 0
        kind = resolved.graph.kind[resolved.graph.backward_of[pair]]
        assert kind == (INPUT_GRADIENT if halves else BACKWARD)
        assert (resolved.graph.weight_of[pair] != NO_TASK) == halves
    gone = np.flatnonzero(resolved.number == NO_TASK)
    assert (graph.kind[gone] == WEIGHT_GRADIENT).all()


def test_a_graph_without_candidates_is_left_as_it_is() -> None:
    case = random_case(3, strategies=("keep",))
    resolved = resolve_candidates(case.graph, None)
    assert resolved.graph is case.graph
    assert [tasks.tolist() for tasks in resolved.schedule(Schedule(case.schedule.order)).order] == [
        tasks.tolist() for tasks in case.schedule.order
    ]
