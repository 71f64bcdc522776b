from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeloom as pl
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.search import METHODS, Budget, Method, alternate, compile_kernels, solve, state
from pipeloom.search.strategies import StrategyChooser
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import check, lower_bound, residence
from pipeloom_instances import family, generate
from tests.chains import uniform_chain
from tests.search.methods import SEARCHES
from tests.strategies import graphs


@given(graphs(), st.sampled_from(SEARCHES), st.integers(0, 1000))
def test_every_answer_is_feasible_and_not_below_the_bound(graph, method, seed):
    try:
        solution = solve(graph, budget=Budget(evaluations=60), seed=seed, method=method)
    except InfeasibleError:
        with pytest.raises(InfeasibleError, match="pair"):
            solve(graph, budget=Budget(evaluations=60), seed=seed, method=method)
        return
    assert check(graph, solution.schedule, solution.timeline) == ()
    assert solution.gap >= 0


def test_a_checker_accepts_every_answer(monkeypatch):
    graph = uniform_chain(2, 3)
    found = solve(graph, budget=Budget(evaluations=5), seed=0)
    late = replace(found.timeline, start_ns=found.timeline.start_ns + 100, end_ns=found.timeline.end_ns + 100)
    monkeypatch.setitem(METHODS, "default", Method(lambda *_: replace(found, timeline=late)))
    with pytest.raises(InputError, match="schedule: start"):
        solve(graph, budget=Budget(evaluations=5), seed=0)


@pytest.mark.parametrize("memory", [None, 1.5])
def test_more_evaluations_are_not_worse_and_repeat_exactly(memory):
    graph = generate(family("vlm-s", num_microbatches=12, memory=memory), 3)
    answers = [solve(graph, budget=Budget(evaluations=n), seed=5) for n in (1, 40, 600, 600)]
    spans = [answer.timeline.makespan_ns for answer in answers]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[2]
    for a, b in zip(answers[2].schedule.order, answers[3].schedule.order, strict=True):
        assert np.array_equal(a, b)
    assert answers[2].evaluations <= 600


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 1), (3, 7, 1), (2, 5, 1), (4, 8, 2)])
def test_uniform_pipelines_reach_their_known_optimum(p, m, v):
    graph = uniform_chain(p, m, chunks_per_rank=v)
    solution = solve(graph, budget=Budget(evaluations=4000), seed=0)
    assert solution.timeline.makespan_ns == (m * v + p - 1) * 3
    assert solution.gap == 0
    assert solution.lower_bound == lower_bound(graph)


def test_candidates_make_room():
    """Room for one kept or four recomputed microbatches: neither extreme is best."""
    graph = uniform_chain(4, 12, forward_ns=10, backward_ns=20, activation_bytes=8, capacity_bytes=20, candidates=True)
    solution = solve(graph, budget=Budget(evaluations=3000), seed=0)
    assert check(graph, solution.schedule, solution.timeline) == ()
    for choice in ([0] * graph.num_pairs, [1] * graph.num_pairs):
        fixed = solve(graph.with_candidates(choice), budget=Budget(evaluations=3000), seed=0)
        assert solution.timeline.makespan_ns < fixed.timeline.makespan_ns


def test_progress_and_threads():
    graph = generate(family("vlm-s", num_microbatches=8, memory=1.5), 0)
    seen = []
    solution = solve(graph, budget=Budget(seconds=20, evaluations=2000), seed=1, threads=2, on_progress=seen.append)
    best = [state.best_ns for state in seen]
    assert best == sorted(best, reverse=True)
    assert best[-1] == solution.timeline.makespan_ns
    assert seen[-1].gap == pytest.approx(solution.gap)
    assert check(graph, solution.schedule, solution.timeline) == ()


def test_a_budget_of_nothing_still_answers():
    graph = uniform_chain(2, 3)
    for budget in (Budget(seconds=0), Budget(evaluations=0)):
        assert check(graph, solve(graph, budget=budget, seed=0).schedule) == ()


INTERRUPTED = {
    "orders": family("vlm-s", num_microbatches=8),
    "strategies": family("vlm-s", num_microbatches=8, strategies=True, memory=1.5),
    "splits": family("vlm-s", num_microbatches=8, split=True, split_price=0.05),
}


@pytest.mark.parametrize("after", [0, 3, 60])
@pytest.mark.parametrize("which", INTERRUPTED)
def test_ctrl_c_gives_the_best_so_far(which, after):
    graph, came = generate(INTERRUPTED[which], 0), []

    def interrupt(progress):
        if progress.evaluations > after and not came:
            came.append(progress.elapsed_s)
            raise KeyboardInterrupt

    found = solve(graph, budget=Budget(seconds=60), seed=0, on_progress=interrupt)
    assert check(graph, found.schedule) == ()
    assert found.elapsed_s < came[0] + 20


@pytest.mark.parametrize(
    ("which", "number"), [("strategies", 1), ("strategies", 2), ("splits", 1), ("splits", 2), ("splits", 3)]
)
def test_ctrl_c_in_a_choice_of_strategies_gives_the_best_so_far(which, number, monkeypatch):
    choose, graph, calls = StrategyChooser.for_schedule, generate(INTERRUPTED[which], 0), []

    def interrupted(*arguments):
        calls.append(None)
        if len(calls) == number:
            raise KeyboardInterrupt
        return choose(*arguments)

    monkeypatch.setattr(StrategyChooser, "for_schedule", interrupted)
    assert check(graph, solve(graph, budget=Budget(evaluations=2000), seed=0).schedule) == ()
    assert len(calls) == number


@pytest.mark.parametrize(("name", "number"), [("Search", 4), ("lower_bound", 1)])
def test_ctrl_c_between_searches_gives_the_best_so_far(name, number, monkeypatch):
    """The static orders of uniform settings were lost until strategies had been chosen for one of them."""
    monkeypatch.setattr(alternate, "FAR", inf)
    made, graph, calls = getattr(alternate, name), generate(INTERRUPTED["strategies"], 0), []

    def interrupted(*arguments, **named):
        calls.append(None)
        if len(calls) == number:
            raise KeyboardInterrupt
        return made(*arguments, **named)

    monkeypatch.setattr(alternate, name, interrupted)
    assert check(graph, solve(graph, budget=Budget(evaluations=2000), seed=0).schedule) == ()
    assert len(calls) == number


@pytest.mark.parametrize("reads", [0, 20, 200, 1000])
def test_a_clock_that_ctrl_c_runs_out_ends_the_choice_of_strategies(reads, monkeypatch):
    """The command line stops the clock. The time of the choice was then not a number, which raised an error."""
    monkeypatch.setattr(alternate, "FAR", 0.0)
    graph = generate(family("vlm-s", num_microbatches=8, strategies=True, memory=1.5), 0)
    left = iter(range(reads))
    budget = Budget(seconds=100.0, clock=lambda: 0.0 if next(left, None) is not None else inf)
    assert check(graph, solve(graph, budget=budget, seed=0).schedule) == ()


def test_bad_arguments():
    graph = uniform_chain(1, 1)
    with pytest.raises(InputError, match="method: 'magic' is none of default"):
        solve(graph, budget=Budget(evaluations=1), seed=0, method="magic")
    with pytest.raises(InputError, match="threads: -1 is negative"):
        solve(graph, budget=Budget(evaluations=1), seed=0, threads=-1)
    with pytest.raises(InputError, match="budget: -1 s is not at least 0"):
        Budget(seconds=-1)
    with pytest.raises(InputError, match="budget: -2 evaluations is not at least 0"):
        Budget(evaluations=-2)
    with pytest.raises(InputError, match="'vlm-z' is none of vlm-s"):
        family("vlm-z")


def test_a_pair_that_cannot_fit_is_named():
    with pytest.raises(InfeasibleError, match=r"pair 0 .*rank 0"):
        solve(uniform_chain(2, 2, activation_bytes=9, capacity_bytes=8), budget=Budget(evaluations=1), seed=0)


def test_warming_up_reaches_list_scheduling_with_a_rule_and_without(monkeypatch):
    """They are compiled apart."""
    seen = []
    real = state.decode_by_task
    monkeypatch.setattr(state, "decode_by_task", lambda *a: seen.append(a[-1] is None) or real(*a))
    compile_kernels()
    assert set(seen) == {True, False}


def test_warming_up_reaches_the_bounds_of_parts(monkeypatch):
    """These were compiled in the time of the first plan, which then was 20 % above its bound."""
    seen = []
    real = residence._meetings
    monkeypatch.setattr(residence, "_meetings", lambda *a: seen.append(a) or real(*a))
    compile_kernels()
    assert seen


def test_times_that_leave_no_room_for_ranks_are_refused():
    """List scheduling keeps a time and a rank in one number; beyond what that holds, it wrote where it must not."""
    graph = uniform_chain(4, 3)
    longest = (1 << 60) // int(graph.duration_ns.sum())
    with pytest.raises(InputError, match=r"which is not below the 1\.15292e"):
        solve(graph_times(graph, longest + 1), budget=Budget(evaluations=5), seed=0)
    fits = graph_times(graph, longest - 1)
    assert check(fits, solve(fits, budget=Budget(evaluations=40), seed=0).schedule) == ()


def graph_times(graph: TaskGraph, factor: int) -> TaskGraph:
    return replace(graph, duration_ns=graph.duration_ns * factor)


def test_a_cost_of_memory_needs_no_change_of_the_search():
    """The example of docs/search.md."""
    page = (Path(__file__).parents[2] / "docs/search.md").read_text().partition("### Change what is minimized")[2]
    code = page.partition("```py\n")[2].partition("```")[0].replace("seconds=1.0", "evaluations=100")
    names: dict[str, Any] = {"pl": pl}
    exec(code, names)
    costs = [names["cost"](solution) for solution in names["found"]]
    assert len(costs) == 3
    assert names["cost"](names["best"]) == min(costs)
