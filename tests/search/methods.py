"""The search methods that tests try: Pipeloom's own, and what other installed distributions add."""

from pipeloom.plugins import SEARCH_METHODS, installed
from pipeloom.search import METHODS

ALL = METHODS | installed(SEARCH_METHODS)
SEARCHES = sorted(set(ALL) - {"cp-sat", "gurobi", "milp", "z3"})
"""Those that are no exact solvers."""
