"""Searches kept for comparison: the papers' tree searches, exact solvers, windows.

Importing this package names them to `pipeloom.search.solve`.
"""

from pipeloom.lab.solvers.exact import cp_sat
from pipeloom.lab.solvers.explore import depth_first, random_search, worst
from pipeloom.lab.solvers.gurobi import gurobi as solve_by_gurobi
from pipeloom.lab.solvers.integer_program import chosen_by_program
from pipeloom.lab.solvers.literal import dip_literal
from pipeloom.lab.solvers.milp import milp as solve_by_highs
from pipeloom.lab.solvers.sequences import uniform_start
from pipeloom.lab.solvers.smt import z3
from pipeloom.lab.solvers.tree import mcts_priority, mcts_sequence
from pipeloom.lab.solvers.windows import default_then_windows
from pipeloom.search.methods import METHODS, ExactSolver, Method, register

EXACT: dict[str, ExactSolver] = {"cp-sat": cp_sat, "milp": solve_by_highs, "gurobi": solve_by_gurobi, "z3": z3}
"""Exact solvers by name."""

register(
    {
        "windows": Method(default_then_windows, assigns=True),
        "mcts": Method(mcts_sequence, every_rollout=True),
        "mcts priority": Method(mcts_priority, every_rollout=True),
        # DIP's tree search with orders made for the best uniform setting, not for the leanest strategies as published.
        "mcts uniform": Method(mcts_sequence, every_rollout=True, start=uniform_start),
        # DIP to the letter: its own memory rule, and HiGHS for every rank in every rollout.
        "dip literal": Method(dip_literal, every_rollout=True),
        "depth first": Method(depth_first, every_rollout=True),
        "random": Method(random_search, every_rollout=True),
        # The default search's order with strategies by the papers' integer program, started from a greedy choice.
        "highs strategies": Method(METHODS["default"].run, finish=chosen_by_program),
        "worst": Method(worst, every_rollout=True),
        **{name: Method(METHODS["default"].run, finish=solver) for name, solver in EXACT.items()},
    }
)

__all__ = ["EXACT", "uniform_start"]
