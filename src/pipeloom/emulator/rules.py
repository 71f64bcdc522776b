"""Rules: rates of devices, and durations of operators from their three metrics.

The duration of an operator is the largest of operations over speed, memory bytes over bandwidth and network bytes over
throughput, each divided by an efficiency (the inverse of the paper's scaling factor; DIP §6.1), and at least the
launch time. Small matrices and short messages are slow, so an efficiency may depend on the operator's time at the peak.
Products of experts that run one after the other overlap operations with memory only in part: they take the root of the
sum of both squares. On SimuMax's 108 grouped products on B200, with the clock of its other products, this lowers the
median error from 10 to 9 % forward, 12 to 6 % for input gradients, and 22 to 14 % for weight gradients.
A custom rule may replace all of this for one kind of operator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.emulator.size import FloatArray
from pipeloom.errors import InputError
from pipeloom.lazy import lazy_module
from pipeloom.spec.hardware import EfficiencySpec
from pipeloom.totals import PS_PER_S, summable

if TYPE_CHECKING:
    from pipeloom.emulator import kernels
else:
    kernels = lazy_module("pipeloom.emulator.kernels")

IntArray = npt.NDArray[np.int64]
METRICS = ("flops", "memory", "network")
_FULL = EfficiencySpec()

PRODUCTS = frozenset({"matmul", "grouped_matmul", "attention", "causal_attention", "scan"})
"""Operators that count as the model's operations in utilization."""
FLOPS_KINDS = PRODUCTS | {"attention_backward", "causal_attention_backward"}
"""Operators that operations limit rather than memory, unless they are tiny."""


def base_kind(kind: str) -> str:
    """Return a kind of operator without its variant: ``attention`` of ``attention@128``."""
    return kind.partition("@")[0]


def table_entry(kind: str, table: Collection[str]) -> str:
    """Return the entry of a table that stands for a kind of operator.

    ``causal_attention@128`` is causal attention of head width 128. If a table lacks it, that of any width stands for
    it, then that of attention, then ``"*"``.
    """
    base = base_kind(kind)
    choices = (kind, base, kind.removeprefix("causal_"), base.removeprefix("causal_"))
    return next((name for name in choices if name in table), "*")


class Counts(NamedTuple):
    """Kind and counts of an operator, the argument of a custom rule."""

    kind: str
    flops: float
    memory_bytes: float
    network_bytes: float


@dataclass(frozen=True)
class Device:
    """One device: compute, memory, link or host. A rate of 0 means that the device does not have this metric."""

    name: str
    flops_per_s: float = 0.0
    memory_bytes_per_s: float = 0.0
    network_bytes_per_s: float = 0.0
    latency_s: float = 0.0
    """Seconds added per step (message) of an operator with steps."""
    launch_s: float = 0.0
    """Minimum seconds of an operator that has anything to do."""
    slowdown: Mapping[str, float] = field(default_factory=dict)
    """Time of operators, relative to the efficiency's. ``"attention"`` stands for causal attention and for the backward
    of both, ``"*"`` for every kind that is not in `FLOPS_KINDS`."""
    sustained: float = 1.0
    """Share of the efficiencies of operations that the device sustains within its power limit."""
    quantized: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Products of other rates: ``"fp8"`` is of the operators ``matmul@fp8`` and ``grouped_matmul@fp8``."""
    efficiency: Mapping[str, EfficiencySpec] = field(default_factory=dict)
    """``"*"`` stands for every other kind."""
    overrides: Mapping[str, Callable[[Counts], float]] = field(default_factory=dict)
    """Rules of kinds of operators, which return seconds."""

    def __post_init__(self) -> None:
        """Raise `InputError` for a device that computes and communicates: these are two devices."""
        if self.network_bytes_per_s and (self.flops_per_s or self.memory_bytes_per_s):
            raise InputError(
                f"device {self.name!r}",
                "has both network throughput and compute or memory rates",
                "describe a link as a device of its own",
            )

    def efficiency_of(self, kind: str) -> EfficiencySpec:
        """Return the efficiency of a kind of operator."""
        return self.efficiency.get(table_entry(kind, self.efficiency), _FULL)

    def slowdown_of(self, kind: str) -> float:
        """Return the time of a kind, relative to the efficiency's."""
        base = base_kind(kind).removeprefix("causal_").removesuffix("_backward")
        return self.slowdown.get(base, 1.0 if base_kind(kind) in FLOPS_KINDS else self.slowdown.get("*", 1.0))

    def factors(self, kind: str) -> tuple[float, float, float]:
        """Return the factors of a kind's efficiencies of operations, memory and network."""
        speed, sustained = 1 / self.slowdown_of(kind), self._products_of(kind)[1]
        return (sustained * speed, 1.0, 1.0) if base_kind(kind) in FLOPS_KINDS else (sustained, speed, 1.0)

    def rates_of(self, kind: str) -> tuple[float, float, float]:
        """Return peak operations, memory bytes and network bytes per second of a kind of operator."""
        return (self._products_of(kind)[0], self.memory_bytes_per_s, self.network_bytes_per_s)

    def _products_of(self, kind: str) -> tuple[float, float]:
        return self.quantized.get(kind.partition("@")[2], (self.flops_per_s, self.sustained))


class RuleTable:
    """Rules of a set of operators as arrays, built once and evaluated for every workload.

    Parameters
    ----------
    steps : per operator
        Consecutive messages.
    pieces : per operator, or None for one each
        Equal kernels in which the operator runs. Its efficiency of operations is that of one of them.
    """

    def __init__(
        self,
        devices: tuple[Device, ...],
        kind: tuple[str, ...],
        device: IntArray,
        steps: FloatArray,
        pieces: FloatArray | None = None,
    ) -> None:
        self.devices, self.kind, self.device, self.steps = devices, kind, device, steps
        rows: dict[tuple[int, str, float], int] = {}
        parts = (np.ones(len(kind)) if pieces is None else pieces).tolist()
        self.rule = np.array(
            [rows.setdefault(key, len(rows)) for key in zip(device.tolist(), kind, parts, strict=True)], np.int64
        )
        chosen = [devices[d].efficiency_of(k) for d, k, _ in rows]
        factors = [devices[d].factors(k) for d, k, _ in rows]
        width = max((len(e.curve(m)) for e in chosen for m in METRICS), default=1)
        self.points = np.zeros((len(rows), 3, width))
        self.values = np.ones((len(rows), 3, width))
        self.counts = np.ones((len(rows), 3), np.int64)
        for r, (e, (_, _, number)) in enumerate(zip(chosen, rows, strict=True)):
            for m, metric in enumerate(METRICS):
                curve = e.curve(metric)
                self.counts[r, m] = len(curve)
                self.points[r, m, : len(curve)] = np.log2([seconds for seconds, _ in curve])
                if metric == "flops":
                    self.points[r, m, : len(curve)] += np.log2(number)
                self.values[r, m, : len(curve)] = [value * factors[r][m] for _, value in curve]
        self.rates = np.array([devices[d].rates_of(k) for d, k, _ in rows]).reshape(-1, 3)
        one_by_one = [base_kind(kind) == "grouped_matmul" and number > 1 for _, kind, number in rows]
        self.fixed = np.array(
            [
                (devices[d].latency_s, devices[d].launch_s * n, some)
                for (d, _, n), some in zip(rows, one_by_one, strict=True)
            ]
        ).reshape(-1, 3)
        self.overridden = tuple(
            (i, devices[d].overrides[base_kind(k)])
            for i, (d, k) in enumerate(zip(device.tolist(), kind, strict=True))
            if base_kind(k) in devices[d].overrides
        )

    def durations_ps(self, amounts: FloatArray) -> IntArray:
        """Return the picoseconds of every operator.

        ``amounts`` are operations, memory bytes and network bytes, shape (num_operators, 3). Raise `InputError` if an
        operator needs a metric that its device does not have, such as network bytes on a compute device, or if the sum
        of all durations is too large.
        """
        bad = np.argwhere((amounts > 0) & (self.rates[self.rule] <= 0))
        for i, m in bad.tolist():
            if any(i == j for j, _ in self.overridden):
                continue
            raise InputError(
                f"operator {i} ({self.kind[i]})",
                f"has {amounts[i, m]:g} of {METRICS[m]}, device {self.devices[int(self.device[i])].name!r} has none",
                "put the operator on a device that does, e.g. a collective on a link",
            )
        rates = np.maximum(self.rates, 1e-300)
        out: FloatArray = kernels.latencies(
            amounts, self.rule, self.steps, rates, self.points, self.values, self.counts, self.fixed
        )
        for i, rule in self.overridden:
            seconds = rule(Counts(base_kind(self.kind[i]), *map(float, amounts[i])))
            if not 0 <= seconds < float("inf"):
                raise InputError(f"rule for {self.kind[i]!r}", f"{seconds} is not a duration in seconds")
            out[i] = round(seconds * PS_PER_S)
        return summable("operators of a layer", out, "ps")
