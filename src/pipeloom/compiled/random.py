"""Random numbers in compiled code: one xorshift64* generator. Its state is an array of one entry."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeloom.compiled.decorators import Array, kernel


@kernel
def _step(state: Array) -> Any:
    """Advance ``state[0]``, which must not be 0, and return 64 scrambled bits. The highest bits are the best."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return x * np.uint64(2685821657736338717)


@kernel
def draw(state: Array) -> Any:
    """Return the next number, 62 bits."""
    return np.int64(_step(state) >> np.uint64(2))


@kernel
def draw31(state: Array) -> Any:
    """Return the next number, 31 bits."""
    return np.int64(_step(state) >> np.uint64(33))


@kernel
def below(state: Array, limit: int) -> int:
    """Return a number from 0 to ``limit - 1``."""
    return int(draw31(state) % limit)


@kernel
def uniform(state: Array) -> Any:
    """Return a number in (0, 1), 31 bits."""
    return (draw31(state) + 0.5) / 2147483648.0


@kernel
def fraction(state: Array) -> Any:
    """Return a number in (0, 1], 52 bits."""
    return (draw(state) % (1 << 52) + 1) / (1 << 52)
