"""Compiled loops of tuning: costs of workloads, one 1F1B iteration with encoders by recurrence, search over orders."""

from __future__ import annotations

import numpy as np

from pipeloom.tuning.kernels.chain import Chain, Scratch, make_scratch
from pipeloom.tuning.kernels.climb import Marginal, climb
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

__all__ = [
    "BACKWARD", "EARLY", "ENCODE", "ENCODE_BACK", "EXTRA", "FORWARD", "INFEASIBLE", "LATE", "NUM_SETTINGS", "OVERRUN",
    "Chain", "Marginal", "Scratch", "best_of", "climb", "interpolate", "make_scratch", "run", "warm_up",
]  # fmt: skip


def warm_up() -> None:
    """Compile all loops for the array types that tuning uses."""
    cost, parts, one = np.ones((2, 1), np.int64), np.ones(2, np.int64), np.ones(1, np.int64)
    chain = Chain(cost, cost.copy(), cost.copy(), cost * 0, np.arange(3), parts, parts.copy(), parts.copy(),
                  parts.copy(), one, one * 99, True)  # fmt: skip
    marginal = Marginal(parts, cost, cost, cost, cost, parts, parts, parts, parts)
    scratch = make_scratch(chain)
    order, settings = np.arange(2), np.zeros(NUM_SETTINGS, np.int64)
    run(chain, order, settings, scratch, 99)
    best_of(chain, order[None].copy(), settings[None].copy(), scratch, 99)
    climb(chain, order, settings, np.arange(2), marginal, 9, scratch, 1, 0, True, True, True, 99, 0)
    grid, numbers = np.array([[1.0, 2.0], [1.0, 2.0]]), np.ones(1)
    interpolate(
        np.array([1.0, 2.0]), grid, np.ones((4, 2, 2)), np.ones(4), numbers, numbers, numbers, np.ones((4, 1))
    )
