"""Size: a count that follows from a workload, kept symbolic so that a module is traced only once.

Every count of the emulator (operations, bytes) is linear in four features of a (sub-)microbatch: a constant,
its instances, its tokens and its query-key pairs. Tracing a module gives coefficients; a new workload then
costs one small matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul

import numpy as np
import numpy.typing as npt

from pipeloom.spec import Workload

FloatArray = npt.NDArray[np.float64]
NUM_FEATURES = 4


@dataclass(frozen=True, slots=True)
class Size:
    """``one + instances * I + tokens * T + token_pairs * P`` for a workload with I, T and P of them."""

    one: float = 0.0
    instances: float = 0.0
    tokens: float = 0.0
    token_pairs: float = 0.0

    def __add__(self, other: Size | float) -> Size:
        """Sum of two sizes, or of a size and a constant."""
        if not isinstance(other, Size):
            return Size(self.one + other, self.instances, self.tokens, self.token_pairs)
        return Size(
            self.one + other.one,
            self.instances + other.instances,
            self.tokens + other.tokens,
            self.token_pairs + other.token_pairs,
        )

    __radd__ = __add__

    def __mul__(self, factor: float) -> Size:
        """Size times a number."""
        return Size(self.one * factor, self.instances * factor, self.tokens * factor, self.token_pairs * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Size:
        """Size over a number."""
        return self * (1.0 / divisor)

    @property
    def row(self) -> tuple[float, float, float, float]:
        """Coefficients in feature order."""
        return (self.one, self.instances, self.tokens, self.token_pairs)

    def of(self, workload: Workload) -> float:
        """Value for one workload."""
        return sum(a * b for a, b in zip(self.row, feature_row(workload), strict=True))


ZERO = Size()
ONE = Size(one=1.0)
INSTANCES = Size(instances=1.0)
TOKENS = Size(tokens=1.0)
TOKEN_PAIRS = Size(token_pairs=1.0)
CAUSAL_PAIRS = (TOKEN_PAIRS + TOKENS) / 2
"""Query-key pairs that a causal mask leaves: n (n + 1) / 2 for each sequence of n tokens."""


def feature_row(workload: Workload) -> tuple[float, float, float, float]:
    """Features of a workload, in the order of `Size.row`."""
    lengths = workload.lengths  # not its properties: this is asked for at every look-up
    pairs = sum(map(mul, lengths, lengths))
    return (1.0, float(len(lengths)), float(sum(lengths)), float(pairs))


def features(workload: Workload) -> FloatArray:
    """Features of a workload as an array, shape (4,)."""
    return np.array(feature_row(workload))
