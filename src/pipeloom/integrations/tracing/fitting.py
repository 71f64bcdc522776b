"""Fit counts as linear in the features of a workload, on several sizes, and check them on one that was left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from pipeloom.errors import InputError
from pipeloom.spec.traced import Counts

_BASES = tuple(each for size in range(1, 5) for each in combinations((2, 3, 0, 1), size))
"""Sets of features, smallest first: tokens, pairs, a constant, instances."""
_EXACT = 1e-6
"""Relative error below which a count is explained."""


class TraceError(InputError):
    """What a model's code runs cannot be described by counts that are linear in a workload's features."""


@dataclass(frozen=True)
class Features:
    """Features of one run: the length of each instance."""

    lengths: tuple[int, ...]

    @property
    def row(self) -> tuple[float, float, float, float]:
        """One, instances, tokens, and query-key pairs."""
        lengths = self.lengths
        return 1.0, float(len(lengths)), float(sum(lengths)), float(sum(n * n for n in lengths))

    @property
    def text(self) -> str:
        """The lengths; many equal ones as a product."""
        same = len(self.lengths) > 4 and len(set(self.lengths)) == 1
        return f"{len(self.lengths)} x {self.lengths[0]}" if same else str(self.lengths)


def error_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def fit(where: str, features: Sequence[Features], values: Sequence[float]) -> Counts:
    """Return coefficients of a count from all sizes but the last, on which they are checked.

    The smallest set of features that explains all sizes is taken. If none does, `TraceError` is raised.
    """
    rows = np.array([each.row for each in features])
    wanted = np.array(values, float)
    if not wanted.any():
        return 0.0, 0.0, 0.0, 0.0
    scale = np.abs(rows).max(axis=0)
    found = np.zeros(4)
    for base in _BASES:
        taken = list(base)
        part = rows[:, taken] / scale[taken]
        if len(base) >= len(values):
            break
        solution = np.linalg.lstsq(part[:-1], wanted[:-1], rcond=None)[0]
        found = np.zeros(4)
        found[taken] = solution / scale[taken]
        if np.all(np.abs(rows @ found - wanted) <= _EXACT * np.abs(wanted).max()):
            one, instances, tokens, pairs = (_clean(each) for each in found)
            return one, instances, tokens, pairs
    at = features[-1].text
    raise TraceError(
        where,
        f"is {values[-1]:,.0f} for lengths {at}, but the other sizes predict {float(rows[-1] @ found):,.0f}",
        "describe this layer in a .toml file, or report the model",
    )


def _clean(value: float) -> float:
    """Return a coefficient without the rounding of the solution."""
    for factor in (1, 2, 3, 4, 64):
        near = round(value * factor) / factor
        if abs(value - near) <= 1e-6 * max(abs(value), 1e-3):
            return float(near)
    return float(f"{value:.9g}")
