"""Exact solvers: their optima agree with each other, no bound is above them, and the search is near them."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

# Before OR-Tools, with which it cannot share a process: so CP-SAT runs in one of its own here.
import highspy  # noqa: F401
import numpy as np
import pytest

from pipeloom.errors import InputError
from pipeloom.search import Deadline, Evaluations, family, generate, solve
from pipeloom.search.exact import cp_sat
from pipeloom.search.milp import milp
from pipeloom.search.plain import first_in_first_out
from pipeloom.timeline import check, lower_bound, simulate
from tests.chains import uniform_chain
from tests.strategies import Shape, random_graph


def needs_ortools():
    if find_spec("ortools") is None:
        pytest.skip("OR-Tools is not installed")


SHAPES = [
    Shape(num_ranks=2, num_microbatches=3, num_modules=2, max_parts=2, memory=1.3, longest_ns=9),
    Shape(num_ranks=3, num_microbatches=3, jitter=True, delays=True, memory=1.0),
    Shape(num_ranks=2, num_microbatches=3, split="all", memory=1.4, edge_bytes=True),
    Shape(num_ranks=3, num_microbatches=2, num_modules=2, frozen=True, max_parts=2),
    Shape(num_ranks=2, num_microbatches=3, num_candidates=3, memory=1.0),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_bounds_and_searches_against_optima(shape, seed):
    needs_ortools()
    graph = random_graph(seed, shape)
    if graph.num_tasks > 40:
        pytest.skip("too large to prove in a moment")
    found = solve(graph, budget=Evaluations(4000), seed=0)
    hint = first_in_first_out(graph)
    exact = cp_sat(graph, seconds=20, hint=hint, bound_ns=0)
    best = simulate(graph, exact.schedule).makespan_ns
    assert check(graph, exact.schedule) == ()
    assert exact.proved
    assert exact.bound_ns == best
    assert lower_bound(graph).ns <= best <= found.timeline.makespan_ns
    assert found.timeline.makespan_ns <= 1.25 * best
    if graph.candidates is None and graph.num_tasks <= 20:
        other = milp(graph, seconds=20, hint=hint, bound_ns=0)
        assert check(graph, other.schedule) == ()
        assert simulate(graph, other.schedule).makespan_ns >= best
        if other.proved:
            assert simulate(graph, other.schedule).makespan_ns == best


@pytest.mark.parametrize("method", ["cp-sat", "milp"])
def test_behind_the_same_interface(method):
    if method == "cp-sat":
        needs_ortools()
    graph = random_graph(1, SHAPES[1])
    solution = solve(graph, budget=Deadline(5), seed=0, method=method)
    assert check(graph, solution.schedule, solution.timeline) == ()
    assert solution.lower_bound.ns <= solution.timeline.makespan_ns
    assert solution.method == method


def test_milp_refuses_candidates():
    graph = uniform_chain(2, 2, candidates=True)
    with pytest.raises(InputError, match="milp takes no candidates"):
        milp(graph, seconds=1, hint=first_in_first_out(graph), bound_ns=0)


def small_vlm(seed):
    """Two ranks, three microbatches, times in whole milliseconds so that CP-SAT is quick."""
    memory = (None, 1.0, 1.5)[seed % 3]
    graph = generate(family("vlm-s", num_ranks=2, num_microbatches=3, memory=memory), seed)
    return replace(graph, duration_ns=graph.duration_ns // 1_000_000 * 1_000_000)


def test_search_is_near_the_optimum_of_small_problems():
    """Proved by CP-SAT; the search gets 20 000 evaluations."""
    needs_ortools()
    gaps = []
    for seed in range(6):
        graph = small_vlm(seed)
        found = solve(graph, budget=Evaluations(20_000), seed=seed)
        best = found.timeline.makespan_ns
        if found.gap > 0:
            exact = cp_sat(graph, seconds=4, hint=found.schedule, bound_ns=found.lower_bound.ns)
            if exact.proved:
                best = simulate(graph, exact.schedule).makespan_ns
        gaps.append(found.timeline.makespan_ns / best - 1)
    assert np.mean(gaps) <= 0.03, gaps
