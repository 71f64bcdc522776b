"""Search methods kept for comparison: the papers' tree searches, exact solvers, windows."""

from pipeloom.search import METHODS as PRODUCT
from pipeloom.search import ExactSolver, Method
from pipeloom_lab.solvers.exact import cp_sat
from pipeloom_lab.solvers.explore import depth_first, random_search, worst
from pipeloom_lab.solvers.gurobi import gurobi as solve_by_gurobi
from pipeloom_lab.solvers.linear import milp as solve_by_highs
from pipeloom_lab.solvers.literal import dip_literal
from pipeloom_lab.solvers.sequences import uniform_start
from pipeloom_lab.solvers.smt import z3
from pipeloom_lab.solvers.tree import mcts_priority, mcts_sequence
from pipeloom_lab.solvers.windows import default_then_windows

EXACT: dict[str, ExactSolver] = {"cp-sat": cp_sat, "milp": solve_by_highs, "gurobi": solve_by_gurobi, "z3": z3}
"""Exact solvers by name."""

METHODS: dict[str, Method] = {
    "windows": Method(default_then_windows, assigns=True),
    "mcts": Method(mcts_sequence, every_rollout=True),
    "mcts priority": Method(mcts_priority, every_rollout=True),
    # DIP's tree search with orders made for the best uniform setting, not for minimum-memory strategies as published.
    "mcts uniform": Method(mcts_sequence, every_rollout=True, start=uniform_start),
    # DIP to the letter: its own memory rule, and HiGHS for every rank in every rollout.
    "dip literal": Method(dip_literal, every_rollout=True),
    "depth first": Method(depth_first, every_rollout=True),
    "random": Method(random_search, every_rollout=True),
    "worst": Method(worst, every_rollout=True),
    **{name: Method(PRODUCT["default"].run, finish=solver) for name, solver in EXACT.items()},
}
"""Search methods by name, as `pipeloom.search.find_method` finds them."""

__all__ = ["EXACT", "METHODS", "uniform_start"]
