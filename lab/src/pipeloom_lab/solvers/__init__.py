"""Search methods kept for comparison: the papers' tree searches, exact solvers, windows."""

from collections.abc import Iterable
from functools import partial

from pipeloom.search import Budget, Method, compile_kernels, search_orders, solve
from pipeloom_instances import family, generate
from pipeloom_lab.solvers.exact import ExactSolver, cp_sat, exact_method
from pipeloom_lab.solvers.explore import depth_first, random_search, worst
from pipeloom_lab.solvers.gurobi import gurobi as solve_by_gurobi
from pipeloom_lab.solvers.linear import milp as solve_by_highs
from pipeloom_lab.solvers.literal import dip_literal
from pipeloom_lab.solvers.rollouts import every_rollout
from pipeloom_lab.solvers.sequences import uniform_start
from pipeloom_lab.solvers.smt import z3
from pipeloom_lab.solvers.tree import mcts_priority, mcts_sequence
from pipeloom_lab.solvers.windows import default_then_windows

EXACT: dict[str, ExactSolver] = {"cp-sat": cp_sat, "milp": solve_by_highs, "gurobi": solve_by_gurobi, "z3": z3}
"""Exact solvers by name."""
ROLLOUTS: dict[str, Method] = {
    "mcts": every_rollout(mcts_sequence),
    "mcts priority": every_rollout(mcts_priority),
    # DIP's tree search with orders made for the best uniform setting, not for minimum-memory strategies as published.
    "mcts uniform": every_rollout(mcts_sequence, uniform_start),
    # DIP to the letter: its own memory rule, and HiGHS for every rank in every rollout.
    "dip literal": every_rollout(dip_literal),
    "depth first": every_rollout(depth_first),
    "random": every_rollout(random_search),
    "worst": every_rollout(worst),
}
"""Searches that choose strategies every time they decode an order, by name."""
METHODS: dict[str, Method] = {
    "windows": Method(partial(search_orders, run=default_then_windows), assigns=True),
    **ROLLOUTS,
    **{name: exact_method(solver) for name, solver in EXACT.items()},
}
"""Search methods by name, as `pipeloom.search.find_method` finds them."""


def compile_methods(methods: Iterable[str]) -> None:
    """Compile the kernels of the search and of these methods before a budget starts."""
    compile_kernels()
    for strategies in (False, True):
        graph = generate(family("vlm-s", num_ranks=2, num_microbatches=3, memory=1.5, strategies=strategies), 0)
        for method in ROLLOUTS.keys() & methods:
            solve(graph, budget=Budget(evaluations=20), seed=0, method=method)


__all__ = ["EXACT", "METHODS", "compile_methods", "uniform_start"]
