"""Calibrate device tables with measured operators (DIP §7.4; measurements are in `runtime`).

Each kind of operator gets one efficiency curve for its limiting metric: operations for matrix products, attention and
scans, network bytes for transfers, memory bytes for all others. The curve is the median share of the peak among
measurements of similar size, so that single outliers do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pipeloom.emulator.build import local_devices
from pipeloom.emulator.rules import FLOPS_KINDS, RuleTable, base_kind
from pipeloom.emulator.size import FloatArray
from pipeloom.emulator.tape import DEVICE_NAMES
from pipeloom.errors import InputError, check_positive
from pipeloom.spec.hardware import DevicePart, DeviceSpec, EfficiencySpec
from pipeloom.totals import PS_PER_S

MOST_POINTS = 6
MOST_LINK_POINTS = 32
NEVER_BINDS = 1e6


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured seconds of one operator, with its counts in the emulator."""

    kind: str
    name: str
    seconds: float
    flops: float = 0.0
    memory_bytes: float = 0.0
    network_bytes: float = 0.0
    part: DevicePart = "compute"
    steps: float = 0.0
    """Number of consecutive messages, each with the link's latency."""
    variant: str = ""
    """Variant of the kind, as in `Cost.rule`: head width, or number of devices."""
    flops_per_key: float = 0.0
    """Operations of an attention's queries on one more key each."""

    def __post_init__(self) -> None:
        check_positive(f"measurement {self.name!r}.seconds", self.seconds)

    @property
    def metric(self) -> str:
        """Limiting metric of this kind of operator."""
        if self.part != "compute":
            return "network"
        return "flops" if base_kind(self.kind) in FLOPS_KINDS and self.flops else "memory"

    @property
    def amount(self) -> float:
        """Amount of the limiting metric."""
        return {"flops": self.flops, "memory": self.memory_bytes, "network": self.network_bytes}[self.metric]


class CalibrationRow(NamedTuple):
    """Predicted and measured seconds of a shape that is not part of the fit."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


class Calibration(NamedTuple):
    """A fitted device, and its predictions of operators and layers that are not part of the fit."""

    device: DeviceSpec
    operators: tuple[CalibrationRow, ...]
    layers: tuple[CalibrationRow, ...]
    links: tuple[CalibrationRow, ...] = ()
    """Messages and collectives; empty if links were not measured."""
    links_note: str = ""
    """Description of the measured link, or the reason why none was measured."""
    measurements: tuple[Measurement, ...] = ()
    """All measured operators and messages, fitted or not."""

    @property
    def mean_layer_error(self) -> float:
        """Mean absolute relative error over layers."""
        return mean_error(self.layers)


def mean_error(rows: Sequence[CalibrationRow]) -> float:
    """Return the mean absolute relative error."""
    return float(np.mean([abs(row.error) for row in rows])) if rows else 0.0


def fit_device(measurements: Sequence[Measurement], *, name: str, source: str, memory_bytes: int) -> DeviceSpec:
    """Fit a device table.

    Peaks are the best measured rates, so that efficiencies are near or below one. Only the product matters for
    predictions. Raise `InputError` if the measurements have no matrix product or no operator that moves memory.
    """
    messages, latency = _smooth([m for m in measurements if m.steps])
    measurements = [*(m for m in measurements if not m.steps), *messages]
    peaks: dict[tuple[str, str], float] = {}
    for m in measurements:
        if m.amount > 0:
            key = (m.part, m.metric)
            peaks[key] = max(peaks.get(key, 0.0), float(m.amount / m.seconds))
    for key, what in ((("compute", "flops"), "matrix product"), (("compute", "memory"), "operator that moves memory")):
        if key not in peaks:
            raise InputError("measurements", f"have no {what}", "measure at least one of several sizes")
    tables: dict[DevicePart, dict[str, EfficiencySpec]] = {}
    for part, kind in sorted({(m.part, m.kind) for m in measurements}):
        same = [m for m in measurements if (m.part, m.kind) == (part, kind) and m.amount > 0]
        metric = same[0].metric
        curve = _curve(same, peaks[part, metric], MOST_LINK_POINTS if latency.get(part) else MOST_POINTS)
        # Metrics without a fit must not be limiting: the measurements contain their effect.
        if metric == "network":
            spec = EfficiencySpec(network=curve)
        elif metric == "flops":
            spec = EfficiencySpec(flops=curve, memory=NEVER_BINDS)
        else:
            spec = EfficiencySpec(flops=NEVER_BINDS, memory=curve)
        tables.setdefault(part, {})[kind] = spec
    # Kinds without measurements get the median efficiency of those with, by memory.
    moved = [m for m in measurements if m.part == "compute" and m.metric == "memory"]
    tables["compute"]["*"] = EfficiencySpec(flops=NEVER_BINDS, memory=_curve(moved, peaks["compute", "memory"]))
    links: tuple[DevicePart, ...] = ("nvlink", "nic", "pcie")
    for link in links:
        if link in tables:
            tables[link]["*"] = next(iter(tables[link].values()))
    return DeviceSpec(
        name=name,
        basis="measured",
        source=source,
        flops_per_s=peaks["compute", "flops"],
        memory_bytes=memory_bytes,
        memory_bytes_per_s=peaks["compute", "memory"],
        nvlink_bytes_per_s=peaks.get(("nvlink", "network"), 0.0),
        nvlink_latency_s=latency.get("nvlink", 0.0),
        pcie_latency_s=latency.get("pcie", 0.0),
        pcie_bytes_per_s=peaks.get(("pcie", "network"), 0.0),
        efficiency=tables,
    )


def _smooth(messages: Sequence[Measurement]) -> tuple[list[Measurement], dict[DevicePart, float]]:
    """Replace messages by a line over their size for each kind, at every doubling of the size.

    Each line is a constant plus bytes over a bandwidth. It minimizes the sum of absolute relative errors, so that large
    messages and outliers do not dominate. The smallest constant per message is the link's latency, and is subtracted.
    The rest of a kind's constant becomes part of its efficiency.
    """
    lines = {}
    latency: dict[DevicePart, float] = {}
    for part, kind in sorted({(m.part, m.kind) for m in messages}):
        same = [m for m in messages if (m.part, m.kind) == (part, kind)]
        size, seconds = np.array([m.amount for m in same]), np.array([m.seconds for m in same])
        fixed, slope = _line(size, seconds)
        lines[part, kind] = (same[0], fixed, slope, np.log2(size.min()), np.log2(size.max()))
        latency[part] = min(latency.get(part, float("inf")), fixed / same[0].steps)
    out = []
    for (part, _), (model, fixed, slope, low, high) in lines.items():
        left = fixed - latency[part] * model.steps
        sizes = np.round(2 ** np.unique(np.append(np.arange(low, high), high)))
        out += [msgspec.structs.replace(model, seconds=left + slope * x, network_bytes=x) for x in sizes.tolist()]
    return out, latency


def _line(size: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    """Return constant and slope, both nonnegative, by iteratively reweighted least squares on relative errors."""
    least = float((seconds / size).min())
    if len(np.unique(size)) < 2:
        return float(np.median(seconds)) / 2, float(np.median(seconds / size)) / 2
    weight = np.ones(len(size))
    fixed, slope = 0.0, least
    for _ in range(30):
        columns = np.stack([1 / seconds, size / seconds], axis=1) * weight[:, None]
        fixed, slope = np.linalg.lstsq(columns, weight, rcond=None)[0].tolist()
        fixed, slope = max(fixed, float(seconds.min()) / 100), max(slope, least / 100)
        weight = 1 / np.sqrt(np.maximum(np.abs((fixed + slope * size) / seconds - 1), 1e-3))
    return fixed, slope


def _curve(
    measurements: Sequence[Measurement], peak: float, most_points: int = MOST_POINTS
) -> tuple[tuple[float, float], ...]:
    """Return the points of an efficiency curve over seconds at the peak: medians of groups of similar size."""
    ordered = sorted(measurements, key=lambda m: m.amount)
    size = np.log2([m.amount for m in ordered])
    share = np.log([m.amount / m.seconds / peak for m in ordered])
    # Groups end at the largest jumps of the size, so that repeated sizes stay together.
    distinct = np.unique(np.round(size, 2))
    count = min(most_points, len(distinct))
    edges = np.quantile(distinct, np.linspace(0, 1, count + 1))
    points: list[tuple[float, float]] = []
    for k in range(count):
        inside = (size >= edges[k] - 0.01) & ((size < edges[k + 1] - 0.01) | (k == count - 1))
        if inside.any():
            x = float(2.0 ** np.median(size[inside])) / peak
            if not points or x > points[-1][0] * 1.001:
                points.append((x, float(np.exp(np.median(share[inside])))))
    return tuple(points)


def predict(
    device: DeviceSpec, measurements: Sequence[Measurement], nic_bytes_per_s: float = 1.0, nic_latency_s: float = 0.0
) -> list[float]:
    """Return the predicted seconds of operators."""
    devices = local_devices(device, nic_bytes_per_s, nic_latency_s)
    table = RuleTable(
        devices,
        tuple(m.kind for m in measurements),
        np.array([DEVICE_NAMES.index(m.part) for m in measurements], np.int64),
        np.array([m.steps for m in measurements], np.float64),
    )
    amounts = np.array([[m.flops, m.memory_bytes, m.network_bytes] for m in measurements]).reshape(-1, 3)
    return [ps / PS_PER_S for ps in table.durations_ps(amounts).tolist()]


def compare(device: DeviceSpec, held_out: Sequence[Measurement]) -> tuple[CalibrationRow, ...]:
    """Return predictions and measurements that are not part of the fit."""
    return tuple(
        CalibrationRow(m.name, predicted, m.seconds)
        for m, predicted in zip(held_out, predict(device, held_out), strict=True)
    )


def robust_posterior(
    slopes: FloatArray,
    errors: FloatArray,
    weight: FloatArray,
    typical: FloatArray | float,
    precision: FloatArray,
    prior: FloatArray,
    *,
    rounds: int = 40,
) -> FloatArray:
    """Return the step of some values that explains errors best, close to a prior.

    Minimizes the Huber loss of ``errors - slopes @ step``, times ``weight`` (the precision of each error), plus the
    squared distance of the step from ``prior``, times the matrix ``precision``. Errors above ``typical`` count linearly
    and not by their square, so that single ones cannot bend the result.
    """
    step: FloatArray = np.zeros(len(prior))
    for _ in range(rounds):
        robust = weight / np.maximum(np.abs(errors - slopes @ step) / typical, 1)
        matrix = slopes.T @ (robust[:, None] * slopes) + precision
        step = np.asarray(np.linalg.solve(matrix, slopes.T @ (robust * errors) + precision @ prior), np.float64)
    return step
