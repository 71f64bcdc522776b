"""A simulation that is resumed equals one from the start, and reuses what comes before the first change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InputError, PlanError
from pipeloom.taskgraph import with_edges
from pipeloom.timeline import Schedule, checkpoint, resume, simulate
from tests.strategies import graphs, random_order
from tests.timeline.test_simulate import tiny


def assert_same(found, expected):
    np.testing.assert_array_equal(found.timeline.start_ns, expected.start_ns)
    np.testing.assert_array_equal(found.timeline.end_ns, expected.end_ns)
    np.testing.assert_array_equal(found.timeline.peak_bytes, expected.peak_bytes)


@given(graphs(), st.data())
def test_a_resumed_simulation_equals_one_from_the_start(graph, data):
    schedule = random_order(graph, np.random.default_rng(data.draw(st.integers(0, 2**31))))
    chosen, plain = graph.with_candidates(schedule.candidate), Schedule(schedule.order)
    saved = checkpoint(graph, schedule)
    assert_same(saved, simulate(graph, schedule))
    assert saved.num_reused == 0
    place = np.argsort(saved.sequence)
    # Other durations.
    task = data.draw(st.integers(0, graph.num_tasks - 1))
    duration = chosen.duration_ns.copy()
    duration[task] += data.draw(st.integers(1, 9))
    slower = replace(chosen, duration_ns=duration)
    found = resume(saved, slower, plain)
    assert_same(found, simulate(slower, plain))
    assert found.num_reused == place[task]
    # A new edge, also against the sequence of the checkpoint.
    one, other = (data.draw(st.integers(0, graph.num_tasks - 1)) for _ in range(2))
    try:
        joined = with_edges(slower, [one], [other], data.draw(st.integers(0, 5)))
        expected = simulate(joined, plain)
    except InputError:  # a cycle of edges
        pass
    except PlanError:
        with pytest.raises(PlanError, match="deadlocks"):
            resume(found, joined, plain)
    else:
        assert_same(resume(found, joined, plain), expected)
    # Nothing changed: everything is reused, also by a checkpoint that has been resumed.
    assert resume(saved, chosen, plain).num_reused == graph.num_tasks
    assert_same(resume(found, chosen, plain), simulate(graph, schedule))


def test_only_what_comes_after_a_change_runs_again():
    graph, schedule = tiny(), Schedule((np.array([0, 3]), np.array([1, 2])))
    saved = checkpoint(graph, schedule)
    duration = graph.duration_ns.copy()
    duration[2] = 5
    found = resume(saved, replace(graph, duration_ns=duration))
    assert found.num_reused == 2
    assert found.timeline.makespan_ns == 4_020_000_005
    with pytest.raises(PlanError, match=r"order deadlocks: .*waits for"):
        resume(saved, graph, Schedule((np.array([3, 0]), np.array([1, 2]))))
    with pytest.raises(InputError, match="cycle"):
        with_edges(graph, [3], [0])
    with pytest.raises(InputError, match=r"edges.target"):
        with_edges(graph, [3], [9])
