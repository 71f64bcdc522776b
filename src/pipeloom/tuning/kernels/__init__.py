"""Compiled loops of tuning: costs of workloads, simulation of one 1F1B iteration with encoders, search of orders."""

from __future__ import annotations

import numpy as np

from pipeloom.tuning.kernels.anneal import Marginal, anneal
from pipeloom.tuning.kernels.chain import Chain, Scratch, make_scratch
from pipeloom.tuning.kernels.interpolate import interpolate
from pipeloom.tuning.kernels.one_f_one_b import (
    BACKWARD,
    EARLY,
    ENCODE,
    ENCODE_BACK,
    EXTRA,
    FORWARD,
    INFEASIBLE,
    LATE,
    NUM_SETTINGS,
    OVERRUN,
    best_of,
    run,
)
from pipeloom.tuning.kernels.sizes import count_parts, sum_parts, sum_sizes

__all__ = [
    "BACKWARD",
    "EARLY",
    "ENCODE",
    "ENCODE_BACK",
    "EXTRA",
    "FORWARD",
    "INFEASIBLE",
    "LATE",
    "NUM_SETTINGS",
    "OVERRUN",
    "Chain",
    "Marginal",
    "Scratch",
    "anneal",
    "best_of",
    "compile_kernels",
    "count_parts",
    "interpolate",
    "make_scratch",
    "run",
    "sum_parts",
    "sum_sizes",
]


def compile_kernels() -> None:
    """Compile all kernels for the array types that tuning uses."""
    cost, parts, one = np.ones((2, 1), np.int64), np.ones(2, np.int64), np.ones(1, np.int64)
    chain = Chain(
        cost,
        cost.copy(),
        cost.copy(),
        cost * 0,
        np.arange(3),
        parts,
        parts.copy(),
        parts.copy(),
        parts.copy(),
        one,
        one * 99,
        True,
    )
    marginal = Marginal(parts, cost, cost, cost, cost, parts, parts, parts, parts)
    scratch = make_scratch(chain)
    order, settings = np.arange(2), np.zeros(NUM_SETTINGS, np.int64)
    run(chain, order, settings, scratch, 99)
    best_of(chain, order[None].copy(), settings[None].copy(), scratch, 99)
    anneal(chain, order, settings, np.arange(2), marginal, 9, scratch, 1, 0, True, True, True, 99, 0, 1.0)
    grid, numbers, whole = np.array([[1.0, 2.0], [1.0, 2.0]]), np.ones(1), np.zeros(1, np.int64)
    interpolate(
        np.array([1.0, 2.0]),
        grid,
        np.ones((1, 4, 2, 2)),
        np.ones((1, 4)),
        numbers,
        numbers,
        numbers,
        np.ones((1, 4, 1)),
    )
    sum_sizes(whole, whole, whole, numbers, numbers, numbers)
    counts = whole.copy()
    start = count_parts(whole, whole, 0, counts)
    sum_parts(whole, whole, whole, counts, start, numbers, numbers, numbers)
