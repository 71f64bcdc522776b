"""The values of a device table that observations say something about, and their Gaussian posterior.

Every value of the table that observations say something about keeps its shipped value as the center of a log-normal
prior. Points of one efficiency curve move together as far as they are near each other. The scatter of the observations
around the curve is estimated from the evidence, so that few observations, or contradicting ones, hardly move it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pipeloom.calibration.evidence import Observation
from pipeloom.emulator.fit import MOST_LINK_POINTS, robust_posterior
from pipeloom.emulator.rules import FLOPS_KINDS, METRICS, Device, base_kind, table_entry
from pipeloom.emulator.size import FloatArray
from pipeloom.emulator.tape import DEVICE_NAMES
from pipeloom.spec.hardware import DevicePart, DeviceSpec, EfficiencySpec, Points
from pipeloom.validation.constants import constants

Key = tuple[DevicePart, str, str]
"""Part of the device, entry of its efficiencies, and metric: one curve of the table."""

SPREADS: dict[str, float] = {"matmul": 0.05, "attention": 0.15, "memory": 0.2, "nvlink": 0.1, "nic": 0.3, "pcie": 0.3}
"""Standard deviation of the logarithm of an efficiency between machines with the same device, by `_spread_kind`.

Of the published kernels in ``benchmarks/kernels``, the level of a framework's products differs by 2 % from the table,
and that of its attention by 15 %. Clocks of equal devices differ by some percent more. NCCL's all-reduce on A100 is
published 13 % below the table (ml-engineering). The curves of networks, copies and memory-bound operators are assumed.
"""
LATENCY_SPREAD = 0.3
"""The same of a link's latency. Assumed: it depends on NCCL's protocol and version."""
UNFITTED_SPREADS = {"sustained": 0.1, "flash2": 0.3}
"""The same of a generation's sustained share and of FlashAttention 2's speed, if no constant is fitted for it."""
NOISE_OF_SPREAD = 3.0
"""Scatter that is assumed before the evidence tells it, relative to the spread of the prior. So one observation moves a
value by a tenth of its distance: it may be an outlier."""
NOISE_COUNT = 4.0
"""Observations that this assumption counts as."""
LEAST_NOISE = 0.02
"""Smallest scatter: repeated runs of a kernel differ as much."""
OCTAVES = 4.0
"""Distance of two points of a curve, in doublings of the time, at which their own movement correlates by 1 / e."""
LEAST_OCTAVES = 0.4
"""Smallest distance of two points of a curve of messages, in doublings."""
HELD_OUT = 3
"""One of this many observations of a curve checks the blend."""
ROUNDS = 12
"""Steps of Gauss and Newton, each with a new estimate of the scatter; the values no longer move after ten."""


class QuantityRow(NamedTuple):
    """What the evidence changed in one quantity of the table."""

    name: str
    num_observations: int
    lowest_s: float
    highest_s: float
    """Range of the observed times."""
    shipped: float
    evidence: float
    blended: float
    """Efficiency at the observed sizes (median) in the base table, in the observations, and after the blend; or the
    value itself of a latency or a share."""
    num_held: int = 0
    base_error: float | None = None
    blended_error: float | None = None
    """Median absolute relative error on the observations that were held out; None: there are none."""


class Blend(NamedTuple):
    """A blended table, and what changed."""

    device: DeviceSpec
    rows: tuple[QuantityRow, ...] = ()
    base_errors: tuple[float, ...] = ()
    blended_errors: tuple[float, ...] = ()
    """Absolute relative errors on the observations that were held out: with the base table, and with a blend that lacks
    them."""


class _Curve(NamedTuple):
    """One curve: points (log2 of the seconds at the peak, efficiency), and the place of its values."""

    points: FloatArray
    values: FloatArray
    first: int

    def at(self, seconds: FloatArray, moved: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the efficiencies, and their derivatives by the logarithm of each moved value (a row for each)."""
        count = len(self.points)
        values = self.values * np.exp(moved[self.first : self.first + count])
        x = np.clip(np.log2(seconds), self.points[0], self.points[-1])
        right = np.clip(np.searchsorted(self.points, x), min(1, count - 1), count - 1)
        left = np.maximum(0, right - 1)
        width = self.points[right] - self.points[left]
        weight = np.divide(x - self.points[left], width, out=np.ones(len(x)), where=width > 0)
        share, rows = np.zeros((len(x), count)), np.arange(len(x))
        share[rows, left] += 1 - weight
        share[rows, right] += weight
        return share @ values, share * values


class TableModel:
    """Values of the table that the observations depend on, and predictions from them."""

    def __init__(self, base: DeviceSpec, observations: Sequence[Observation], devices: tuple[Device, ...]) -> None:
        self.base, self.observations, self.devices = base, observations, devices
        self.curves: dict[Key, _Curve] = {}
        self.blocks: list[FloatArray] = []
        """Covariance of each block of values: the points of a curve, or one value."""
        self.entries = [self._entry(one) for one in observations]
        self.groups = _grouped(self.entries)
        counts = np.array([(m.flops, m.memory_bytes, m.network_bytes) for m, *_ in observations]).reshape(-1, 3)
        rates = np.array([self._device(m.part).rates_of(m.kind) for m, *_ in observations]).reshape(-1, 3)
        self.at_peak = counts / np.maximum(rates, 1e-300)
        self.steps = np.array([m.steps for m, *_ in observations], np.float64)
        self.seconds = np.array([m.seconds for m, *_ in observations])
        for entry in sorted(self.groups):
            self._add_curves(*entry)
        self.sustained_spread = generation_spread(base, "sustained")
        self.shared = {name: self._place(spread) for name, spread in self._shared().items()}

    @property
    def num_values(self) -> int:
        """Number of values."""
        return sum(len(block) for block in self.blocks)

    def _place(self, spread: float) -> int:
        place = self.num_values
        self.blocks.append(np.array([[spread**2]]))
        return place

    def _shared(self) -> dict[str, float]:
        """Return the quantities beside curves, with the spreads of their priors."""
        shared = {}
        for part in ("nvlink", "pcie"):
            if any(o.measurement.part == part and o.measurement.steps for o in self.observations):
                shared[f"{part}_latency_s"] = LATENCY_SPREAD
        if any(one.hot and base_kind(one.measurement.kind) in FLOPS_KINDS for one in self.observations):
            shared["sustained"] = self.sustained_spread
        if any(one.flash2 for one in self.observations):
            shared["flash2"] = generation_spread(self.base, "flash2")
        return {name: spread for name, spread in shared.items() if self._shared_value(name) > 0}

    def _shared_value(self, name: str) -> float:
        if name == "sustained":
            return self.base.sustained
        return self.base.generation.flash2 if name == "flash2" else float(getattr(self.base, name))

    def _entry(self, one: Observation) -> tuple[DevicePart, str]:
        """Return the entry of the table that an observation moves.

        A head width, a number of devices inside a node or a precision that the table lacks gets an entry of its own.
        """
        part, kind = one.measurement.part, one.measurement.kind
        table = self.base.efficiency.get(part, {})
        if kind in table or (part == "nvlink" and kind != base_kind(kind)):
            return part, kind
        if base_kind(kind) in FLOPS_KINDS:
            return part, kind
        return part, table_entry(kind, table)

    def _add_curves(self, part: DevicePart, entry: str) -> None:
        device = self._device(part)
        efficiency = device.efficiency_of(entry)
        metrics = ("network",) if part != "compute" else ("flops", "memory")
        for metric in metrics:
            points, values = np.array([(np.log2(x), y) for x, y in efficiency.curve(metric)]).T
            if metric == "network":
                points, values = self._refined(points, values, (part, entry))
            self.curves[part, entry, metric] = _Curve(points, values, self.num_values)
            near = np.exp(-np.abs(points[:, None] - points[None, :]) / OCTAVES)
            self.blocks.append(_spread_of(part, entry, metric) ** 2 * (1 + near) / 2)

    def _refined(
        self, points: FloatArray, values: FloatArray, entry: tuple[DevicePart, str]
    ) -> tuple[FloatArray, FloatArray]:
        """Return the same curve with more points: at the observed sizes of messages, where protocols change."""
        sizes = np.log2(np.unique(self.at_peak[self.groups[entry], METRICS.index("network")]))
        for size in sizes[(sizes > points[0]) & (sizes < points[-1])].tolist():
            if len(points) < MOST_LINK_POINTS and np.abs(points - size).min() > LEAST_OCTAVES:
                value = np.interp(size, points, values)
                at = int(np.searchsorted(points, size))
                points, values = np.insert(points, at, size), np.insert(values, at, value)
        return points, values

    def _device(self, part: DevicePart) -> Device:
        return self.devices[DEVICE_NAMES.index(part)]

    def predict(self, moved: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the seconds of all observations, and the derivatives of their logarithms by each value."""
        total = np.empty(len(self.observations))
        slopes = np.zeros((len(total), self.num_values))
        for (part, entry), members in self.groups.items():
            shared = {name: self._shared_share(name, members, moved) for name in ("sustained", "flash2")}
            speed = np.prod([share for share, _ in shared.values()], axis=0)
            best, by_value = np.zeros(len(members)), np.zeros((len(members), self.num_values))
            for metric in METRICS:
                curve = self.curves.get((part, entry, metric))
                at_peak = self.at_peak[members, METRICS.index(metric)]
                if curve is None or not at_peak.any():
                    continue
                efficiency, rises = curve.at(np.maximum(at_peak, 1e-300), moved)
                limited = metric == "flops" and base_kind(entry) in FLOPS_KINDS
                seconds = at_peak / efficiency / (speed if limited else 1.0)
                row = np.zeros_like(by_value)
                row[:, curve.first : curve.first + rises.shape[1]] = -rises / efficiency[:, None]
                for name, (_, holds) in shared.items():
                    if limited and name in self.shared:
                        row[:, self.shared[name]] = -1.0 * holds
                by_value = np.where((seconds > best)[:, None], row, by_value)
                best = np.maximum(best, seconds)
            launch = self._device(part).launch_s
            by_value[best < launch] = 0.0
            steps = self.steps[members] * self._latency(part, moved)
            total[members] = np.maximum(best, launch) + steps
            slopes[members] = by_value * (best / total[members])[:, None]
            place = self.shared.get(f"{part}_latency_s")
            if place is not None:
                slopes[members, place] += steps / total[members]
        return total, slopes

    def _shared_share(self, name: str, members: list[int], moved: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return by how much a shared quantity scales the speed of observations, and whether (0 or 1) it does."""
        some = [self.observations[i] for i in members]
        holds = np.array([one.hot if name == "sustained" else one.flash2 for one in some], np.float64)
        if name not in self.shared:
            return np.ones(len(some)), holds
        # Products of other precisions sustain another share, which the same clocks scale.
        value = self._device("compute").factors(some[0].measurement.kind)[0]
        value = (value if name == "sustained" else self._shared_value(name)) * float(np.exp(moved[self.shared[name]]))
        return np.where(holds > 0, value, 1.0), holds

    def _latency(self, part: DevicePart, moved: FloatArray) -> float:
        latency, place = self._device(part).latency_s, self.shared.get(f"{part}_latency_s")
        return latency if place is None else latency * float(np.exp(moved[place]))

    def fit(self, use: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> FloatArray:
        """Return the moved values (logarithms, relative to the base) of the posterior of some observations.

        Keeps the spread of the sustained share that is left.
        """
        moved = np.zeros(self.num_values)
        chosen = np.flatnonzero(use)
        if not len(chosen):
            return moved
        covariance = np.zeros((self.num_values, self.num_values))
        at = 0
        for block in self.blocks:
            covariance[at : at + len(block), at : at + len(block)] = block
            at += len(block)
        precision = np.asarray(np.linalg.inv(covariance + 1e-10 * np.eye(at)), np.float64)
        measured = np.log(self.seconds[chosen])
        groups = _grouped([self.entries[i] for i in chosen])
        noise = np.empty(len(chosen))
        errors = measured - np.log(self.predict(moved)[0][chosen])
        for entry, members in groups.items():
            # Starts at the evidence, because observations that agree count in full there.
            level = float(np.median(errors[members]))
            noise[members] = _noise(errors[members], _spread_of(*entry))
            for metric in METRICS:
                if curve := self.curves.get((*entry, metric)):
                    moved[curve.first : curve.first + len(curve.values)] = -level
        for _ in range(ROUNDS):
            seconds, slopes = (every[chosen] for every in self.predict(moved))
            errors = measured - np.log(seconds)
            # The prior pulls the whole movement back, not only this round's step.
            step = robust_posterior(slopes, errors, noise**-2.0, 1.345 * noise, precision, -moved, rounds=2)
            moved = moved + step
            left = errors - slopes @ step
            for entry, members in groups.items():
                noise[members] = _noise(left[members], _spread_of(*entry))
        if "sustained" in self.shared:
            left_over = np.linalg.inv(slopes.T @ (slopes / noise[:, None] ** 2) + precision)
            self.sustained_spread = float(left_over[self.shared["sustained"], self.shared["sustained"]]) ** 0.5
        return moved

    def held_out(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return every third observation of each entry, by size. Fewer than three are all fitted."""
        held = np.zeros(len(self.observations), bool)
        for members in self.groups.values():
            order = sorted(members, key=lambda i: (self.observations[i].measurement.amount, i))
            held[order[1::HELD_OUT] if len(order) >= HELD_OUT else []] = True
        return held

    def errors(self, moved: FloatArray) -> FloatArray:
        """Return the absolute relative errors on all observations."""
        errors: FloatArray = np.abs(self.predict(moved)[0] / self.seconds - 1)
        return errors

    def rows(
        self,
        moved: FloatArray,
        held: np.ndarray[tuple[int], np.dtype[np.bool_]],
        base_errors: FloatArray,
        blended_errors: FloatArray,
    ) -> list[QuantityRow]:
        """Return what changed in each entry of the efficiencies."""
        start, out = np.zeros(self.num_values), []
        all_base, all_blended = self.predict(start)[0], self.predict(moved)[0]
        for (part, entry), members in sorted(self.groups.items()):
            times, base, blended = self.seconds[members], all_base[members], all_blended[members]
            metric = self.observations[members[0]].measurement.metric
            at_peak = np.maximum(self.at_peak[members, METRICS.index(metric)], 1e-300)
            shipped = self.curves[part, entry, metric].at(at_peak, start)[0]
            checks = [i for i in members if held[i]]
            out.append(
                QuantityRow(
                    _label(part, entry, metric),
                    len(members),
                    float(times.min()),
                    float(times.max()),
                    float(np.median(shipped)),
                    float(np.median(shipped * base / times)),
                    float(np.median(shipped * base / blended)),
                    len(checks),
                    float(np.median(base_errors[checks])) if checks else None,
                    float(np.median(blended_errors[checks])) if checks else None,
                )
            )
        return out

    def shared_rows(self, moved: FloatArray) -> list[QuantityRow]:
        """Return what changed in latencies and shares."""
        out = []
        for name, place in self.shared.items():
            of = [i for i, one in enumerate(self.observations) if self._depends(one, name)]
            times = self.seconds[of].tolist()
            value = self._shared_value(name)
            blended = value * float(np.exp(moved[place]))
            out.append(QuantityRow(_SHARED[name], len(of), min(times), max(times), value, float("nan"), blended))
        return out

    def _depends(self, one: Observation, name: str) -> bool:
        if name.endswith("_latency_s"):
            return one.measurement.steps > 0 and name.startswith(one.measurement.part)
        hot_or_flash2 = one.hot if name == "sustained" else one.flash2
        return hot_or_flash2 and base_kind(one.measurement.kind) in FLOPS_KINDS

    def table(self, moved: FloatArray) -> DeviceSpec:
        """Return the table with the moved values."""
        parts = {part: dict(entries) for part, entries in self.base.efficiency.items()}
        for part, entry in sorted(set(self.entries)):
            table = parts.setdefault(part, {})
            before = self.base.efficiency.get(part, {}).get(table_entry(entry, table), EfficiencySpec())
            changes = {
                metric: _points(curve, moved)
                for (of, name, metric), curve in self.curves.items()
                if (of, name) == (part, entry)
            }
            after = msgspec.structs.replace(before, **changes)
            for follower in _followers(entry, before, self.base.efficiency.get(part, {})):
                if (part, follower) not in self.entries:
                    table[follower] = after
            table[entry] = after
        changed: dict[str, object] = {"efficiency": parts}
        for name, place in self.shared.items():
            value = self._shared_value(name) * float(np.exp(moved[place]))
            if name.endswith("_latency_s"):
                changed[name] = float(f"{value:.4g}")
            elif name == "flash2":
                generation = changed.get("generation", self.base.generation)
                changed["generation"] = msgspec.structs.replace(generation, flash2=float(f"{value:.3g}"))  # type: ignore[type-var]
        table_of = msgspec.structs.replace(self.base, **changed)
        if "sustained" in self.shared:
            return with_sustained(table_of, float(np.exp(moved[self.shared["sustained"]])))
        return table_of


_SHARED = {
    "nvlink_latency_s": "latency of a message, nvlink",
    "pcie_latency_s": "latency of a message, pcie",
    "sustained": "sustained share of a cool device's rate",
    "flash2": "speed of FlashAttention 2",
}
"""Names of quantities beside curves."""


def generation_spread(device: DeviceSpec, field: str) -> float:
    """Return the spread of a field of a device's generation: that of the constant which is fitted for it."""
    target = f"generations/{device.generation.name}.{field}"
    return next((one.spread for one in constants() if target in one.targets), UNFITTED_SPREADS[field])


def with_sustained(device: DeviceSpec, factor: float) -> DeviceSpec:
    """Return a table whose sustained shares are multiplied by a factor; at most the whole rate."""

    def scaled(share: float, of: float = 1.0) -> float:
        return float(f"{min(of, share * factor):.4g}")

    generation = msgspec.structs.replace(
        device.generation,
        sustained=scaled(device.generation.sustained),
        sustained_fp8=scaled(device.generation.sustained_fp8),
    )
    return msgspec.structs.replace(
        device,
        generation=generation,
        sustained_flops_per_s=scaled(device.sustained_flops_per_s, device.flops_per_s),
        sustained_fp8_flops_per_s=scaled(device.sustained_fp8_flops_per_s, device.fp8_flops_per_s),
        sustained_fp4_flops_per_s=scaled(device.sustained_fp4_flops_per_s, device.fp4_flops_per_s),
    )


def _followers(entry: str, before: EfficiencySpec, table: Mapping[str, EfficiencySpec]) -> list[str]:
    """Return entries without measurements of their own, which the table gives the same values."""
    names = (base_kind(entry), f"grouped_{entry}", "*")
    return [name for name in names if name != entry and table.get(name) == before]


def _spread_kind(part: DevicePart, entry: str, metric: str) -> str:
    if part != "compute":
        return part
    if metric == "memory" or base_kind(entry) not in FLOPS_KINDS:
        return "memory"
    return "attention" if "attention" in entry else "matmul"


def _spread_of(part: DevicePart, entry: str, metric: str = "flops") -> float:
    return SPREADS[_spread_kind(part, entry, metric)]


def _noise(left: FloatArray, spread: float) -> float:
    """Return the scatter of observations: that of their errors, with the assumed one as some of them.

    What all errors have in common is no scatter: the prior holds the curve away from the observations.
    """
    assumed, left = NOISE_OF_SPREAD * spread, np.abs(left - np.median(left))
    # An outlier counts as twice the typical error, so that it cannot silence all the others.
    bounded = np.minimum(left, 2 * max(float(np.median(left)) * 1.4826, LEAST_NOISE))
    variance = (NOISE_COUNT * assumed**2 + float(bounded @ bounded)) / (NOISE_COUNT + len(left))
    return max(LEAST_NOISE, float(np.sqrt(variance)))


def _grouped(entries: Sequence[tuple[DevicePart, str]]) -> dict[tuple[DevicePart, str], list[int]]:
    groups: dict[tuple[DevicePart, str], list[int]] = defaultdict(list)
    for i, entry in enumerate(entries):
        groups[entry].append(i)
    return groups


def _points(curve: _Curve, moved: FloatArray) -> Points:
    values = curve.values * np.exp(moved[curve.first : curve.first + len(curve.values)])
    if len(values) == 1:
        return float(f"{values[0]:.4g}")
    return tuple(
        (float(f"{2.0**x:.4g}"), float(f"{y:.4g}")) for x, y in zip(curve.points.tolist(), values.tolist(), strict=True)
    )


def _label(part: DevicePart, entry: str, metric: str) -> str:
    if part != "compute":
        return f"{'all collectives and messages' if entry == '*' else entry}, {part}"
    if entry == "*":
        return "operators that memory limits"
    return f"{entry}, {'operations' if metric == 'flops' else 'memory'}"
