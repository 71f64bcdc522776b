"""Correction: what measured iterations say about predicted costs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from pipeloom.errors import InputError


class Correction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Corrections of a cost model, learned while training ran.

    Attributes
    ----------
    modules : dict
        Per module, measured over predicted seconds of (forward, backward). Absent means 1.
    link : (float, float) or None
        Measured seconds of an empty message between two ranks, and seconds per byte; None: nothing was measured
        yet, and the cluster's own links hold.
    """

    modules: dict[str, tuple[float, float]] = {}
    link: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Refuse factors and links that cannot be."""
        for name, pair in self.modules.items():
            if not all(0 < factor < float("inf") for factor in pair):
                raise InputError(f"correction.modules[{name!r}]", f"{pair} are not positive and finite")
        if self.link is not None and not all(0 <= part < float("inf") for part in self.link):
            raise InputError("correction.link", f"{self.link} are not finite and at least 0")


def fit_link(messages: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Fit a link to messages: (bytes, seconds under way) to seconds of an empty one, and seconds per byte.

    The line goes through the medians of the smaller and of the larger half, so that a message that was held up
    by something else does not bend it; where all are of about one size, the rate is 0 and the latency is what
    they take. None where there is no message.
    """
    if not messages:
        return None
    ordered = sorted(messages)
    middle = len(ordered) // 2
    halves = (ordered[:middle], ordered[middle:]) if middle else (ordered, ordered)
    (small, quick), (large, slow) = (
        (median(size for size, _ in half), median(seconds for _, seconds in half)) for half in halves
    )
    rate = max(0.0, (slow - quick) / (large - small)) if large >= 2 * small and large > small else 0.0
    if rate * small > quick:
        # No latency could be less than nothing: then the line goes through the origin.
        return 0.0, slow / large
    return (quick - rate * small if rate else median(seconds for _, seconds in ordered)), rate
