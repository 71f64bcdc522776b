"""Correction: what measured iterations say about predicted costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from pipeloom.errors import InputError

_MOST_SIZES = 8


class Correction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Corrections of a cost model, learned while training ran.

    Attributes
    ----------
    modules : dict
        Per module, measured over predicted seconds of (forward, backward). Absent means 1.
    link : (float, float) or None
        Measured seconds of an empty message between two ranks, and seconds per byte; None: nothing was measured
        yet, and the cluster's own links hold.
    slowness : tuple of float
        Per pipeline rank, how many times longer it computes than the modules' factors say; beyond its end 1.
    """

    modules: dict[str, tuple[float, float]] = {}
    link: tuple[float, float] | None = None
    slowness: tuple[float, ...] = ()

    def slowness_of(self, num_ranks: int) -> tuple[float, ...]:
        """Of so many ranks, how many times longer each computes than most."""
        return (*self.slowness, *(1.0,) * num_ranks)[:num_ranks]

    def __post_init__(self) -> None:
        """Refuse factors and links that cannot be."""
        for name, pair in self.modules.items():
            if not all(0 < factor < float("inf") for factor in pair):
                raise InputError(f"correction.modules[{name!r}]", f"{pair} are not positive and finite")
        if self.link is not None and not all(0 <= part < float("inf") for part in self.link):
            raise InputError("correction.link", f"{self.link} are not finite and at least 0")
        if not all(0 < factor < float("inf") for factor in self.slowness):
            raise InputError("correction.slowness", f"{self.slowness} are not positive and finite")


def fit_link(messages: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Fit a link to messages: (bytes, seconds under way) to seconds of an empty one, and seconds per byte.

    Of the lines through the medians of any two sizes, level ones and those without latency included, the one that
    is least off (sum of absolute relative errors): messages that were held up by something else do not bend it. None
    where there is no message.
    """
    if not messages:
        return None
    size, seconds = (np.array(column, dtype=float) for column in zip(*sorted(messages), strict=True))
    # Sizes in the order of magnitude of one another count as one.
    groups = np.array_split(np.arange(len(size)), min(_MOST_SIZES, len(np.unique(size))))
    points = [(float(np.median(size[group])), float(np.median(seconds[group]))) for group in groups]
    lines = [(slow, 0.0) for _, slow in points] + [(0.0, slow / large) for large, slow in points if large]
    for (small, quick), (large, slow) in itertools.combinations(points, 2):
        if large > small and slow >= quick:
            rate = (slow - quick) / (large - small)
            if quick >= rate * small:
                lines.append((quick - rate * small, rate))
    scale = np.maximum(seconds, 1e-9)
    return min(lines, key=lambda line: float((np.abs(line[0] + line[1] * size - seconds) / scale).sum()))
