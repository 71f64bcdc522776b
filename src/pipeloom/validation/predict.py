"""Predict published runs, with intervals from the errors on other published runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeloom.errors import PipeloomError
from pipeloom.integrations.megatron import Recompute
from pipeloom.integrations.megatron.timing import Timed, Timing
from pipeloom.validation.confidence import LeaveOut, Residual, interval
from pipeloom.validation.constants import fitted_ids, shipped, values_without, with_values
from pipeloom.validation.express import ExpressedRun, express
from pipeloom.validation.runs import PublishedRun

_FULL = Recompute("full", "uniform", 1)


@dataclass(frozen=True)
class Prediction:
    """The prediction of one run.

    Attributes
    ----------
    seconds, low_s, high_s : float
        Predicted time of an iteration, and its 80 % interval. 0 if the run cannot be expressed.
    peak_bytes : int
        Predicted peak memory of the fullest rank.
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
    peak_bytes: int = 0
    fitted: bool = False
    reason: str = ""
    notes: tuple[str, ...] = ()

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
        The constants are fitted without runs that have the same value, and the interval does not count them. For the
        interval, runs of the same source and model never count.
    """
    try:
        expressed = express(run)
        values = values_without(leave_out, getattr(run, leave_out)) if leave_out else shipped()
        timed, timing = emulate(with_values(expressed, values))
        times = [timed.iteration_s]
        if run.recompute == "unknown":
            # The published run recomputed nothing, everything, or a part.
            times.append(timing.of(replace(expressed.run.now, recompute=_FULL)).iteration_s)
    except PipeloomError as error:
        return Prediction(run, reason=_reason(error, run.id))
    trust = interval(run.device, run.kind, lambda one: _counts(one, run, leave_out), unseen=leave_out == "device")
    return Prediction(
        run,
        timed.iteration_s,
        trust.of(min(times))[0],
        trust.of(max(times))[1],
        int(timed.peak_bytes.max()),
        fitted=leave_out is None and run.id in fitted_ids(),
        notes=expressed.notes,
    )


def _counts(residual: Residual, run: PublishedRun, leave_out: LeaveOut | None) -> bool:
    """Return whether the error on another run tells something about this one."""
    same = residual.source == run.source and residual.model == run.model
    return not same and (leave_out is None or getattr(residual, leave_out) != getattr(run, leave_out))


def emulate(expressed: ExpressedRun) -> tuple[Timed, Timing]:
    """Emulate an iteration of a run. Also return the timing, for variants of the run."""
    timing = Timing(expressed.run, expressed.cluster, expressed.trainer)
    return timing.of(expressed.run.now), timing


def _reason(error: PipeloomError, run: str) -> str:
    return str(error).removeprefix(f"{run}: ")
