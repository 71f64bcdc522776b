"""Search: the best schedule within a budget, and its distance from the optimum."""

from pipeloom.search.families import FAMILIES, Family, family, generate
from pipeloom.search.plain import first_in_first_out
from pipeloom.search.result import Progress, Solution
from pipeloom.search.solve import METHODS, solve, warm_up
from pipeloom.search.stopping import Both, Deadline, Evaluations, StoppingRule

__all__ = [
    "FAMILIES",
    "METHODS",
    "Both",
    "Deadline",
    "Evaluations",
    "Family",
    "Progress",
    "Solution",
    "StoppingRule",
    "family",
    "first_in_first_out",
    "generate",
    "solve",
    "warm_up",
]
