"""Calibration: device tables fitted to measured operators (`dip.txt` §7.4; the measuring is in `runtime`).

Each kind of operator gets one efficiency curve, for the metric that sets its pace: operations for matrix
products, attention and scans, memory bytes for the rest, network bytes for transfers. The curve is the
median share of the peak among measurements of like size, so that a single disturbed one does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pipeloom.emulator.build import local_devices
from pipeloom.emulator.rules import PS_PER_S, RuleTable
from pipeloom.emulator.tape import DEVICE_NAMES
from pipeloom.errors import InputError
from pipeloom.spec.hardware import DeviceSpec, EfficiencySpec, Part

FLOPS_KINDS = frozenset({"matmul", "grouped_matmul", "scan"}) | {
    f"{causal}attention{backward}" for causal in ("", "causal_") for backward in ("", "_backward")
}
MOST_POINTS = 6
NEVER_BINDS = 1e6


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One operator timed: its counts as the emulator reckons them, and the seconds that it took."""

    kind: str
    name: str
    seconds: float
    flops: float = 0.0
    memory_bytes: float = 0.0
    network_bytes: float = 0.0
    part: Part = "compute"

    def __post_init__(self) -> None:
        """Refuse times that no clock gives."""
        if not 0 < self.seconds < float("inf"):
            raise InputError(
                f"measurement {self.name!r}.seconds", f"{self.seconds} is not positive and finite"
            )

    @property
    def metric(self) -> str:
        """Metric that sets the pace of this kind of operator."""
        if self.part != "compute":
            return "network"
        return "flops" if self.kind in FLOPS_KINDS and self.flops else "memory"

    @property
    def amount(self) -> float:
        """Size in that metric."""
        return {"flops": self.flops, "memory": self.memory_bytes, "network": self.network_bytes}[self.metric]


class CalibrationRow(NamedTuple):
    """A shape that was not fitted: predicted and measured, and the relative error."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_s / self.measured_s - 1


class Calibration(NamedTuple):
    """A fitted device, and how well it predicts operators and layers that were not fitted."""

    device: DeviceSpec
    operators: tuple[CalibrationRow, ...]
    layers: tuple[CalibrationRow, ...]

    @property
    def mean_layer_error(self) -> float:
        """Mean absolute relative error over layers."""
        return mean_error(self.layers)


def mean_error(rows: Sequence[CalibrationRow]) -> float:
    """Mean absolute relative error."""
    return float(np.mean([abs(row.error) for row in rows])) if rows else 0.0


def fit_device(
    measurements: Sequence[Measurement], *, name: str, source: str, memory_bytes: int, reserved_bytes: int = 0
) -> DeviceSpec:
    """Fit a device table.

    The peaks are the best rates measured, so that efficiencies stay near or below one; only their product
    matters to predictions.

    Raises
    ------
    InputError
        When there is no matrix product or nothing that moves memory among the measurements.
    """
    peaks: dict[tuple[str, str], float] = {}
    for m in measurements:
        if m.amount > 0:
            key = (m.part, m.metric)
            peaks[key] = max(peaks.get(key, 0.0), float(m.amount / m.seconds))
    for key, what in (
        (("compute", "flops"), "matrix product"),
        (("compute", "memory"), "operator that moves memory"),
    ):
        if key not in peaks:
            raise InputError("measurements", f"have no {what}", "measure at least one of several sizes")
    tables: dict[Part, dict[str, EfficiencySpec]] = {}
    for part, kind in sorted({(m.part, m.kind) for m in measurements}):
        mine = [m for m in measurements if (m.part, m.kind) == (part, kind) and m.amount > 0]
        metric = mine[0].metric
        curve = _curve(mine, peaks[part, metric])
        # The metric that is not fitted must not set the pace: the measurements contain it.
        if metric == "network":
            spec = EfficiencySpec(network=curve)
        elif metric == "flops":
            spec = EfficiencySpec(flops=curve, memory=NEVER_BINDS)
        else:
            spec = EfficiencySpec(flops=NEVER_BINDS, memory=curve)
        tables.setdefault(part, {})[kind] = spec
    # What was not measured behaves like the middle of what was, by memory.
    moved = [m for m in measurements if m.part == "compute" and m.metric == "memory"]
    tables["compute"]["*"] = EfficiencySpec(
        flops=NEVER_BINDS, memory=_curve(moved, peaks["compute", "memory"])
    )
    links: tuple[Part, ...] = ("nvlink", "nic", "pcie")
    for link in links:
        if link in tables:
            tables[link]["*"] = next(iter(tables[link].values()))
    return DeviceSpec(
        name=name, basis="measured", source=source, flops_per_s=peaks["compute", "flops"],
        memory_bytes=memory_bytes, memory_bytes_per_s=peaks["compute", "memory"], reserved_bytes=reserved_bytes,
        nvlink_bytes_per_s=peaks.get(("nvlink", "network"), 0.0), pcie_bytes_per_s=peaks.get(("pcie", "network"), 0.0),
        efficiency=tables,
    )  # fmt: skip


def _curve(measurements: Sequence[Measurement], peak: float) -> tuple[tuple[float, float], ...]:
    """Points of an efficiency curve: medians of groups of like size."""
    ordered = sorted(measurements, key=lambda m: m.amount)
    size = np.log2([m.amount for m in ordered])
    share = np.log([m.amount / m.seconds / peak for m in ordered])
    # Groups end where the size jumps most, so that repeated sizes stay together.
    distinct = np.unique(np.round(size, 2))
    count = min(MOST_POINTS, len(distinct))
    edges = np.quantile(distinct, np.linspace(0, 1, count + 1))
    points: list[tuple[float, float]] = []
    for k in range(count):
        inside = (size >= edges[k] - 0.01) & ((size < edges[k + 1] - 0.01) | (k == count - 1))
        if inside.any():
            x = float(2.0 ** np.median(size[inside]))
            if not points or x > points[-1][0] * 1.001:
                points.append((x, float(np.exp(np.median(share[inside])))))
    return tuple(points)


def predict(
    device: DeviceSpec, measurements: Sequence[Measurement], nic_bytes_per_s: float = 1.0
) -> list[float]:
    """Seconds that the table gives for operators."""
    devices = local_devices(device, nic_bytes_per_s, 0.0)
    table = RuleTable(
        devices, tuple(m.kind for m in measurements),
        np.array([DEVICE_NAMES.index(m.part) for m in measurements], np.int64), np.zeros(len(measurements)),
    )  # fmt: skip
    amounts = np.array([[m.flops, m.memory_bytes, m.network_bytes] for m in measurements]).reshape(-1, 3)
    return [ps / PS_PER_S for ps in table.durations_ps(amounts).tolist()]


def compare(device: DeviceSpec, held_out: Sequence[Measurement]) -> tuple[CalibrationRow, ...]:
    """Predictions beside measurements that were not fitted."""
    return tuple(
        CalibrationRow(m.name, predicted, m.seconds)
        for m, predicted in zip(held_out, predict(device, held_out), strict=True)
    )
