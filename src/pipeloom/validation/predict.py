"""Predict published runs, with intervals from the errors on other published runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from pipeloom.errors import PipeloomError
from pipeloom.spec.hardware import DeviceSpec
from pipeloom.validation.confidence import LeaveOut, Residual, interval, is_quantized
from pipeloom.validation.constants import Values, fitted_ids, shipped, values_without, with_values
from pipeloom.validation.express import ExpressedRun, express
from pipeloom.validation.reasons import kind_of
from pipeloom.validation.runs import PublishedRun
from pipeloom.validation.unstated import complete


@dataclass(frozen=True)
class Prediction:
    """The prediction of one run."""

    run: PublishedRun
    seconds: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    """Predicted time of an iteration, and its 80 % interval. 0 if the run cannot be expressed."""
    rank_bytes: tuple[int, ...] = ()
    """Predicted peak memory of every rank."""
    attention: Literal["fused", "flash2", "unfused", ""] = ""
    """Whether the emulated attention keeps its scores; empty if the run cannot be expressed."""
    fitted: bool = False
    """Whether a constant of the emulator was fitted to this run."""
    reason: str = ""
    """Why the run cannot be expressed; empty if it can."""
    reason_kind: str = ""
    """What the reason has in common with those of other runs."""
    notes: tuple[str, ...] = ()
    """What the source leaves out, and what was assumed."""

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


def predict(run: PublishedRun, leave_out: LeaveOut | None = None, table: DeviceSpec | None = None) -> Prediction:
    """Predict one run.

    Parameters
    ----------
    table : DeviceSpec or None
        Table of a device, such as a blended one, instead of the zoo's device of the same name.
    leave_out : "device", "source", "model" or None
        The constants are fitted without runs that have the same value, and the interval does not count them. For the
        interval, runs of the same source and model never count.
    """
    try:
        known = complete(run)
        if not run.gpus:
            run = replace(run, gpus=known.run.gpus)  # the published time of a run may need them
        expressed = on_table(express(known.run), table)
        values = values_without(leave_out, getattr(run, leave_out)) if leave_out else shipped()
        seconds, rank_bytes = with_values(expressed, values).predict()
    except PipeloomError as error:
        return Prediction(run, reason=str(error).removeprefix(f"{run.id}: "), reason_kind=kind_of(error))
    times = [seconds, *_seconds_of(known.others, values, table)]
    trust = interval(
        run.device,
        known.run.kind,
        lambda one: _counts(one, run, leave_out),
        quantized=is_quantized(run),
        unseen=leave_out == "device",
    )
    return Prediction(
        run,
        seconds,
        trust.of(min(times))[0],
        trust.of(max(times))[1],
        rank_bytes,
        expressed.trainer.attention,
        fitted=leave_out is None and run.id in fitted_ids(),
        notes=known.notes + expressed.notes,
    )


def on_table(expressed: ExpressedRun, table: DeviceSpec | None) -> ExpressedRun:
    """Return a run on a table of its device; the same run if the table is None or of another device."""
    if table is None or table.name != expressed.cluster.device.name:
        return expressed
    return replace(expressed, cluster=msgspec.structs.replace(expressed.cluster, device=table))


def _seconds_of(others: Iterable[PublishedRun], values: Values, table: DeviceSpec | None) -> Iterator[float]:
    """Return the times of a run with other assumed values. A value that contradicts what is stated does not count."""
    for other in others:
        with suppress(PipeloomError):
            yield with_values(on_table(express(other), table), values).predict()[0]


def _counts(residual: Residual, run: PublishedRun, leave_out: LeaveOut | None) -> bool:
    """Return whether the error on another run tells something about this one."""
    same = residual.source == run.source and residual.model == run.model
    return not same and (leave_out is None or getattr(residual, leave_out) != getattr(run, leave_out))
