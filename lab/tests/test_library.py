from __future__ import annotations

import numpy as np
import pytest

from pipeloom.errors import InputError
from pipeloom.search import Budget, solve
from pipeloom.timeline import check, lower_bound
from pipeloom_instances import LIBRARY, instance
from pipeloom_lab.library_runs import gap_table, run_library

SMALL = [name for name in LIBRARY if name.startswith(("small", "tiny", "uniform"))]


def test_the_same_name_gives_the_same_problem():
    first, again, other = instance("small-vlm/1"), instance("small-vlm/1"), instance("small-vlm/2")
    assert np.array_equal(first.duration_ns, again.duration_ns)
    assert first.name == "small-vlm/1"
    assert first.num_tasks != other.num_tasks or not np.array_equal(first.duration_ns, other.duration_ns)


@pytest.mark.parametrize("name", SMALL)
def test_small_ones_are_solved_feasibly(name):
    graph = instance(f"{name}/0")
    found = solve(graph, budget=Budget(evaluations=500), seed=0)
    assert check(graph, found.schedule, found.timeline) == ()
    assert lower_bound(graph).ns <= found.timeline.makespan_ns
    if name.startswith("uniform") and "may-split" not in name:
        assert found.timeline.makespan_ns <= found.lower_bound.ns + 1  # durations are rounded


def test_table_of_gaps():
    runs = list(run_library(["tiny-vlm-m1"], ["portfolio", "random"], budgets_s=[0.02], seeds=range(3)))
    assert [run.instance for run in runs[:2]] == ["tiny-vlm-m1/0"] * 2
    head, rule, row = gap_table(runs).splitlines()
    assert head == "| family | s | portfolio | random |"
    assert rule.count("---") == 4
    assert row.startswith("| tiny-vlm-m1 | 0.02 | ")


@pytest.mark.parametrize("name", ["vlm-s", "vlm-z/1", "vlm-s/x"])
def test_bad_names(name):
    with pytest.raises(InputError, match="is not FAMILY/SEED"):
        instance(name)


def test_strategies_of_a_family_trade_time_for_bytes():
    graph = instance("vlm-s-strategies-m1.5/0")
    assert graph.candidates is not None
    for row in graph.candidates:
        assert 2 <= len(row) <= 10
        assert row[0].strategy == "keep"
        assert row[-1].strategy == "recompute"
        times = [c.forward_ns + c.backward_ns for c in row]
        assert times == sorted(times)
        held = [c.activation_bytes for c in row]
        assert held == sorted(held, reverse=True)
        assert times[0] < times[-1]
        assert held[-1] * 9 <= held[0] <= held[-1] * 10
    base = instance("vlm-s/0")
    assert np.array_equal(graph.duration_ns, base.duration_ns)


def test_traces_tell_the_gap_at_any_time():
    (run,) = run_library(["small-vlm-m1.5"], ["default"], budgets_s=[0.3], seeds=[0])
    moments, makespans = zip(*run.trace, strict=True)
    assert list(moments) == sorted(moments)
    assert list(makespans) == sorted(makespans, reverse=True)
    assert makespans[-1] == run.makespan_ns
    assert run.gap_at(10.0) == run.gap
    assert run.gap_at(0.0) == run.gap_at(moments[0]) >= run.gap_at(moments[-1])
