"""Strategies by the papers' integer program: held to what the search's own choice is held to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeloom_lab.solvers.integer_program import program_on_rank, program_strategies
from tests.search.test_host_memory import SMALL, assert_fits_on_the_host, offloading
from tests.search.test_strategies import FEW_CHOICES, assert_between_bound_and_optimum
from tests.strategies import graphs


@given(graphs(**FEW_CHOICES))
def test_chosen_strategies_are_feasible_and_between_bound_and_optimum(graph):
    assert_between_bound_and_optimum(graph, program_strategies, program_on_rank, 1.06)


@given(graphs(**SMALL), st.integers(0, 40))
def test_chosen_strategies_fit_on_the_host_and_are_between_bound_and_optimum(graph, room):
    assert_fits_on_the_host(offloading(graph, room), program_strategies, program_on_rank)
