"""Search: the best schedule within a budget, and its distance from the optimum."""

from pipeloom.search.assignment import Assigned, compile_assignment_kernels, solve_assignable
from pipeloom.search.budget import Budget, Deadline, Evaluations, Meter, Stretch
from pipeloom.search.compilation import compile_kernels
from pipeloom.search.methods import METHODS, Method, find_method, search_orders
from pipeloom.search.params import SearchParams
from pipeloom.search.plain import first_in_first_out
from pipeloom.search.result import Progress, Solution
from pipeloom.search.rule import ChunkRule, OrderRule
from pipeloom.search.solve import solve
from pipeloom.search.static_orders import (
    check_group_size,
    gpipe,
    group_sizes,
    interleaved_as_megatron,
    interleaved_one_f_one_b,
    one_f_one_b,
)
from pipeloom.search.strategies import Strategies, choose_strategies
from pipeloom.search.uniform import uniform_settings
from pipeloom.search.zero_bubble import zero_bubble_in_flight

__all__ = [
    "METHODS",
    "Assigned",
    "Budget",
    "ChunkRule",
    "Deadline",
    "Evaluations",
    "Meter",
    "Method",
    "OrderRule",
    "Progress",
    "SearchParams",
    "Solution",
    "Strategies",
    "Stretch",
    "check_group_size",
    "choose_strategies",
    "compile_assignment_kernels",
    "compile_kernels",
    "find_method",
    "first_in_first_out",
    "gpipe",
    "group_sizes",
    "interleaved_as_megatron",
    "interleaved_one_f_one_b",
    "one_f_one_b",
    "search_orders",
    "solve",
    "solve_assignable",
    "uniform_settings",
    "zero_bubble_in_flight",
]
