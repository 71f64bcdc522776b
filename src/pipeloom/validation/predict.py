"""Predict published runs, with intervals from the errors on other published runs."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple

import numpy as np

from pipeloom.errors import PipeloomError
from pipeloom.integrations.megatron import Recompute
from pipeloom.integrations.megatron.timing import Timing
from pipeloom.validation.express import express
from pipeloom.validation.runs import PublishedRun

LeaveOut = Literal["device", "source", "model"]
COVERED = 0.8
"""Share of published runs that intervals are made to cover."""
_FULL = Recompute("full", "uniform", 1)
_LEAST = 20
"""Least number of runs of a device and kind of model that give an interval of their own."""


class Residual(NamedTuple):
    """The error on a run of the shipped table: the logarithm of its published time over the predicted one."""

    id: str
    source: str
    device: str
    model: str
    kind: str
    error: float


@dataclass(frozen=True)
class Prediction:
    """The prediction of one run.

    Attributes
    ----------
    seconds, low_s, high_s : float
        Predicted time of an iteration, and its 80 % interval. 0 if the run cannot be expressed.
    rank_bytes : tuple of int
        Predicted peak memory of every rank.
    attention : "flash", "unfused" or ""
        Whether the emulated attention keeps its scores; empty if the run cannot be expressed.
    fitted : bool
        Whether a constant of the emulator was fitted to this run.
    reason : str
        Why the run cannot be expressed; empty if it can.
    notes : tuple of str
        What the source leaves out, and what was assumed.
    """

    run: PublishedRun
    seconds: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    rank_bytes: tuple[int, ...] = ()
    attention: Literal["flash", "unfused", ""] = ""
    fitted: bool = False
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Predicted peak memory of the fullest rank."""
        return max(self.rank_bytes, default=0)

    @property
    def error(self) -> float | None:
        """Predicted over published time, less 1; None if either is unknown."""
        measured = self.run.measured_s
        return self.seconds / measured - 1 if measured and self.seconds else None

    @property
    def row(self) -> dict[str, object]:
        """The prediction as a row of a table."""
        if self.reason:
            return {"id": self.run.id, "reason": self.reason}
        return {
            "id": self.run.id,
            "predicted_s": self.seconds,
            "predicted_low_s": self.low_s,
            "predicted_high_s": self.high_s,
            "predicted_peak_bytes": self.peak_bytes,
            "fitted": self.fitted,
        }


def predict(run: PublishedRun, leave_out: LeaveOut | None = None) -> Prediction:
    """Predict one run.

    Parameters
    ----------
    leave_out : "device", "source", "model" or None
        Runs with the same value do not count for the interval. Runs of the same source and model never do.
    """
    try:
        expressed = express(run)
        now = expressed.run.now
        timing = Timing(expressed.run, expressed.cluster, expressed.trainer)
        timed = timing.of(now)
        times = [timed.iteration_s]
        if run.recompute == "unknown":
            # The published run recomputed nothing, everything, or a part.
            times.append(timing.of(replace(now, recompute=_FULL)).iteration_s)
    except PipeloomError as error:
        return Prediction(run, reason=_reason(error, run.id))
    low, high = interval(run, leave_out)
    return Prediction(
        run,
        timed.iteration_s,
        min(times) * math.exp(low),
        max(times) * math.exp(high),
        tuple(timed.peak_bytes.tolist()),
        expressed.trainer.attention,
        notes=expressed.notes,
    )


def _reason(error: PipeloomError, run: str) -> str:
    return str(error).removeprefix(f"{run}: ")


def interval(run: PublishedRun, leave_out: LeaveOut | None = None) -> tuple[float, float]:
    """Return the 80 % interval of a run, as logarithms to add to that of the predicted time.

    It is that of the errors on other runs of the device and kind of model; if there are few, of the kind of model; if
    there are few again, of all. Runs of the same source and model do not count.
    """

    def counts(residual: Residual) -> bool:
        same = residual.source == run.source and residual.model == run.model
        return not same and (leave_out is None or getattr(residual, leave_out) != getattr(run, leave_out))

    others = [residual for residual in residuals() if counts(residual)]
    pools: Sequence[Callable[[Residual], bool]] = (
        lambda one: one.device == run.device and one.kind == run.kind,
        lambda one: one.kind == run.kind,
        lambda _one: True,
    )
    for belongs in pools:
        pool = [one for one in others if belongs(one)]
        if len(pool) >= _LEAST:
            break
    return quantiles(pool) if pool else (0.0, 0.0)


def quantiles(pool: Iterable[Residual]) -> tuple[float, float]:
    """Return the bounds that cover `COVERED` of the errors; every source has the same weight.

    Errors of one source are alike, so a source with many runs says little about another.
    """
    rows = sorted(pool, key=lambda one: one.error)
    runs = Counter(one.source for one in rows)
    weight = np.cumsum([1 / runs[one.source] for one in rows])
    at = (weight - weight[0] / 2) / weight[-1]
    low, high = np.interp([(1 - COVERED) / 2, (1 + COVERED) / 2], at, [one.error for one in rows])
    return float(low), float(high)


@cache
def residuals() -> tuple[Residual, ...]:
    """Return the errors on the shipped runs, as ``scripts/record_residuals.py`` recorded them."""
    text = (files("pipeloom.validation") / "data" / "residuals.csv").read_text()
    rows = list(csv.reader(text.splitlines()))[1:]
    return tuple(Residual(i, s, d, m, k, float(error)) for i, s, d, m, k, error in rows)
