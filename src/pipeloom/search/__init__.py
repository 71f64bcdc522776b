"""Search: the best schedule within a budget, and its distance from the optimum."""

from pipeloom.search.candidates import LayerOption, pair_candidates
from pipeloom.search.dealing import Dealt, solve_dealt, warm_up_dealing
from pipeloom.search.families import FAMILIES, Family, family, generate
from pipeloom.search.levels import levels_by_time
from pipeloom.search.library import LIBRARY, Run, gap_table, instance, run_library
from pipeloom.search.plain import first_in_first_out
from pipeloom.search.result import Progress, Solution
from pipeloom.search.solve import EXACT, METHODS, solve, warm_up
from pipeloom.search.stopping import Begun, Both, Deadline, Evaluations, Share, StoppingRule
from pipeloom.search.strategies import Strategies, choose_strategies
from pipeloom.search.uniform import uniform_start

__all__ = [
    "EXACT",
    "FAMILIES",
    "LIBRARY",
    "METHODS",
    "Begun",
    "Both",
    "Deadline",
    "Dealt",
    "Evaluations",
    "Family",
    "LayerOption",
    "Progress",
    "Run",
    "Share",
    "Solution",
    "StoppingRule",
    "Strategies",
    "choose_strategies",
    "family",
    "first_in_first_out",
    "gap_table",
    "generate",
    "instance",
    "levels_by_time",
    "pair_candidates",
    "run_library",
    "solve",
    "solve_dealt",
    "uniform_start",
    "warm_up",
    "warm_up_dealing",
]
