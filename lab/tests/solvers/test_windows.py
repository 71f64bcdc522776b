from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from pipeloom.errors import InfeasibleError, InputError
from pipeloom.search import Budget, solve
from pipeloom.search.plain import first_in_first_out
from pipeloom.timeline import check, simulate
from pipeloom_instances import family, generate
from pipeloom_lab.solvers import exact_worker
from pipeloom_lab.solvers.windows import _reorder, cut
from tests.strategies import Shape, random_graph

needs_ortools = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-Tools is not installed")


@needs_ortools
@pytest.mark.parametrize(
    ("num_seeds", "seconds", "least"), [(3, 2.0, 2), pytest.param(24, 10.0, 10, marks=pytest.mark.full)]
)
def test_what_a_window_says_is_shorter_is_shorter_and_fits(num_seeds, seconds, least):
    shapes = [
        Shape(num_ranks=3, num_microbatches=6, num_modules=2, max_parts=2, memory=1.3, delays=True, longest_ns=1000),
        Shape(num_ranks=2, num_microbatches=6, split="all", memory=1.3, edge_bytes=True, longest_ns=1000),
        Shape(num_ranks=3, num_microbatches=6, jitter=True, longest_ns=1000),
    ]
    improved = 0
    for seed in range(num_seeds):
        graph = random_graph(seed, shapes[seed % 3])
        try:
            schedule = first_in_first_out(graph)
        except InfeasibleError:
            continue
        timeline = simulate(graph, schedule)
        for part in range(3):
            begin = timeline.makespan_ns * part // 4
            inside = (timeline.start_ns >= begin) & (timeline.start_ns < begin + timeline.makespan_ns // 2)
            if inside.sum() < 2:
                continue
            window = cut(graph, schedule.order, timeline, inside, begin)
            # OR-Tools cannot be loaded beside HiGHS. A window that takes longer is left as it is.
            starts = exact_worker.call("windows.solve_window", window, 0, seconds)
            if starts is None:
                continue
            changed = type(schedule)(_reorder(schedule.order, timeline, inside, starts))
            assert check(graph, changed) == ()
            assert simulate(graph, changed).makespan_ns < timeline.makespan_ns
            improved += 1
    assert improved >= least


@pytest.mark.full
@needs_ortools
def test_the_method_is_feasible_and_no_worse_than_its_start():
    graph = generate(family("vlm-s", num_microbatches=24, memory=1.5), 1)
    found = solve(graph, budget=Budget(evaluations=80), seed=0, method="windows")
    assert check(graph, found.schedule, found.timeline) == ()
    assert np.isfinite(found.gap)
    assert found.timeline.makespan_ns <= solve(graph, budget=Budget(evaluations=40), seed=0).timeline.makespan_ns


def test_without_ortools_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr("pipeloom_lab.solvers.windows.find_spec", lambda name: None)
    graph = generate(family("vlm-s", num_microbatches=24, memory=1.5), 1)
    with pytest.raises(InputError, match="windows needs OR-Tools"):
        solve(graph, budget=Budget(evaluations=50), seed=0, method="windows")
