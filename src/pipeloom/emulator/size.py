"""`Size`: a count as a symbolic function of a workload, so that a module is traced only once.

Every count of the emulator (operations, bytes) is linear in a few features of a (sub-)microbatch: a constant, its
instances, its tokens, its query-key pairs, and the pairs within each attention window. Tracing a module gives
coefficients. A new workload then costs one small matrix product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.spec import Workload

FloatArray = npt.NDArray[np.float64]


class Window(NamedTuple):
    """Keys that a query attends to: the last ``length`` keys up to itself, or those of its own block."""

    length: int
    slides: bool

    def pairs(self, lengths: Iterable[int]) -> int:
        """Return the query-key pairs of sequences. Blocks are full except the last of each sequence."""
        width, total = self.length, 0
        for n in lengths:
            inside, rest = min(n, width), n % width
            total += inside * (inside + 1) // 2 + (n - inside) * width if self.slides else (n - rest) * width + rest**2
        return total


Windowed = tuple[tuple[Window, float], ...]


@dataclass(frozen=True, slots=True)
class Size:
    """``one + instances * I + tokens * T + token_pairs * P`` for a workload with I instances, T tokens and P pairs.

    ``windowed`` has further coefficients of the pairs within windows.
    """

    one: float = 0.0
    instances: float = 0.0
    tokens: float = 0.0
    token_pairs: float = 0.0
    windowed: Windowed = ()

    def __add__(self, other: Size | float) -> Size:
        """Return the sum of two sizes, or of a size and a constant."""
        if not isinstance(other, Size):
            return Size(self.one + other, self.instances, self.tokens, self.token_pairs, self.windowed)
        return Size(
            self.one + other.one,
            self.instances + other.instances,
            self.tokens + other.tokens,
            self.token_pairs + other.token_pairs,
            _sum(self.windowed, other.windowed) if self.windowed and other.windowed else self.windowed + other.windowed,
        )

    __radd__ = __add__

    def __mul__(self, factor: float) -> Size:
        """Return the size times a number."""
        windowed = self.windowed and tuple((window, part * factor) for window, part in self.windowed)
        return Size(
            self.one * factor, self.instances * factor, self.tokens * factor, self.token_pairs * factor, windowed
        )

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Size:
        """Return the size divided by a number."""
        return self * (1.0 / divisor)

    def row(self, windows: tuple[Window, ...] = ()) -> tuple[float, ...]:
        """Return the coefficients in feature order. ``windows`` are all windows that it may have."""
        plain = (self.one, self.instances, self.tokens, self.token_pairs)
        if not windows:
            return plain
        found = dict(self.windowed)
        return (*plain, *(found.get(window, 0.0) for window in windows))

    def of(self, workload: Workload) -> float:
        """Return the value for one workload."""
        windows = tuple(window for window, _ in self.windowed)
        return sum(a * b for a, b in zip(self.row(windows), feature_row(workload, windows), strict=True))


def _sum(one: Windowed, other: Windowed) -> Windowed:
    total = dict(one)
    for window, part in other:
        total[window] = total.get(window, 0.0) + part
    return tuple(total.items())


ZERO = Size()
ONE = Size(one=1.0)
INSTANCES = Size(instances=1.0)
TOKENS = Size(tokens=1.0)
TOKEN_PAIRS = Size(token_pairs=1.0)
CAUSAL_PAIRS = (TOKEN_PAIRS + TOKENS) / 2
"""Query-key pairs under a causal mask: n (n + 1) / 2 for each sequence of n tokens."""


def window_pairs(length: int, *, causal: bool) -> Size:
    """Return the query-key pairs within a window: causal windows slide, others are blocks."""
    return Size(windowed=((Window(length, causal), 1.0),))


def feature_row(workload: Workload, windows: tuple[Window, ...] = ()) -> tuple[float, ...]:
    """Return the features of a workload, in the order of `Size.row`."""
    lengths = workload.lengths  # not its properties, because every look-up computes this
    pairs = sum(map(mul, lengths, lengths))
    plain = (1.0, float(len(lengths)), float(sum(lengths)), float(pairs))
    return (*plain, *(float(window.pairs(lengths)) for window in windows)) if windows else plain
