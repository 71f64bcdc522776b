"""How far predictions can be trusted: intervals and probabilities from the errors on published runs."""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.emulator.rules import IntArray
from pipeloom.emulator.size import FloatArray
from pipeloom.spec.architecture import Architecture, has_scan, num_experts
from pipeloom.spec.catalog import load_device
from pipeloom.spec.hardware import DeviceSpec
from pipeloom.spec.trainer import TrainerSpec
from pipeloom.units import seconds_range_text
from pipeloom.validation.express import DEVICES, precision
from pipeloom.validation.runs import DATA, ModelKind, PublishedRun, published_runs

LeaveOut = Literal["device", "source", "model"]
_MODELS: dict[ModelKind, str] = {
    "dense": "dense models",
    "experts": "models with experts",
    "other": "hybrid or multimodal models",
}
TRAINERS = ("megatron", "torchtitan")
"""Trainers of the published runs, in the zoo. The errors are those of times that are predicted with their costs."""
COVERED = 0.8
"""Share of published runs that intervals are made to cover."""
FEWEST = 20
"""Fewest runs of a device and kind of model that give an interval of their own."""
FEWEST_PAIRS = 40
"""Fewest pairs of runs that give a probability."""


class Residual(NamedTuple):
    """The error on a published run: the logarithm of its published time over the predicted one."""

    id: str
    source: str
    device: str
    model: str
    kind: str
    error: float
    """The constants are fitted without the runs of the same source and model."""
    without_device: float
    """The constants are fitted without the runs on the same device."""
    quantized: bool = False
    """Whether its products run in FP8 or FP4."""


class Interval(NamedTuple):
    """An 80 % interval of a predicted time."""

    low: float
    high: float
    """Bounds, relative to the predicted time."""
    basis: str
    """The runs whose errors it has."""
    median: float = 0.0
    """Median of the absolute error on these runs: predicted over published time, less 1."""

    def of(self, seconds: float) -> tuple[float, float]:
        """Return the bounds of a predicted time."""
        return self.low * seconds, self.high * seconds

    def text(self, seconds: float) -> str:
        """Return the bounds of a predicted time as text."""
        return seconds_range_text(*self.of(seconds))

    def fields(self, seconds: float) -> dict[str, float]:
        """Return the bounds of a predicted time as fields of a row of ``--json``."""
        return dict(zip(("iteration_low_s", "iteration_high_s"), self.of(seconds), strict=True))

    @property
    def note(self) -> str:
        """What the bounds are, in a sentence without its period."""
        return f"{INTERVAL} from {self.basis}"


class Chance(NamedTuple):
    """The probability that a predicted gain has the right sign, and the number of published pairs that tell."""

    probability: float
    num_pairs: int

    @property
    def text(self) -> str:
        """The probability in percent; empty if there is no difference."""
        return f"{100 * self.probability:.0f} %" if self.num_pairs else ""


INTERVAL = f"{100 * COVERED:.0f} % interval"
"""Heading of a column of intervals."""
SIGN_RIGHT = "share of pairs of published runs, predicted to differ by as much, that differed in this direction"
"""Explanation of a column of probabilities."""


@cache
def residuals() -> tuple[Residual, ...]:
    """Return the errors on the published runs, as ``scripts/fit_constants.py`` recorded them."""
    rows = list(csv.reader((DATA / "residuals.csv").read_text().splitlines()))[1:]
    quantized = {run.id for run in published_runs() if is_quantized(run)}
    return tuple(
        Residual(i, source, device, model, kind, float(error), float(without), i in quantized)
        for i, source, device, model, kind, error, without in rows
    )


@cache
def published_device(name: str) -> str | None:
    """Return the name that tables of runs have for a device of the zoo, by the name in its file; None: no run."""
    ran = {residual.device for residual in residuals()}
    return next((run for run, zoo in DEVICES.items() if run in ran and load_device(zoo).name == name), None)


def is_quantized(run: PublishedRun) -> bool:
    """Return whether the products of a run are in FP8 or FP4."""
    return precision(run.precision) not in (None, "bf16")


def interval(
    device: str | None,
    kind: ModelKind,
    counts: Callable[[Residual], bool] | None = None,
    *,
    quantized: bool = False,
    unseen: bool = False,
) -> Interval:
    """Return the interval of times on a device.

    It is that of the errors on runs of the device, kind of model and precision; if there are few, of the kind of model
    and precision, then of the kind of model, then of all.

    Parameters
    ----------
    device : str or None
        Name of the device in tables of runs (`published_device`). None, or without a run: the interval is that of
        leaving each device out.
    kind : ModelKind
        Kind of model.
    counts : callable or None
        Whether the error on a run counts. None: all do.
    quantized : bool
        Whether products run in FP8 or FP4.
    unseen : bool
        Whether the constants were fitted without the runs of the device. The interval is then the same.
    """
    pool = [one for one in residuals() if counts is None or counts(one)]
    unseen = unseen or all(one.device != device for one in pool)
    runs = f"published runs of {_MODELS[kind]}"
    alike_runs = runs + (" with quantized products" if quantized else " in 16 bits")

    def is_alike(one: Residual) -> bool:
        return one.kind == kind and one.quantized == quantized

    choices: tuple[tuple[str, Callable[[Residual], bool]], ...] = (
        (f"{alike_runs} on {device}", lambda one: is_alike(one) and one.device == device and not unseen),
        (f"{alike_runs} on any device", is_alike),
        (f"{runs} on any device", lambda one: one.kind == kind),
        ("published runs of any model on any device", lambda _one: True),
    )
    pools = [(basis, [one for one in pool if belongs(one)]) for basis, belongs in choices]
    basis, some = next((each for each in pools if len(each[1]) >= FEWEST), pools[-1])
    basis = f"{len(some)} {basis}" + (", each device left out in turn" if unseen else "")
    alike = {f"on {device or 'this device'}": [one.device == device for one in some]}
    alike[f"of {_MODELS[kind]}"] = [one.kind == kind for one in some]
    for what, flags in alike.items():
        if not all(flags):
            basis += f"; {sum(flags) or 'none'} {what}"
    if not some:
        return Interval(1.0, 1.0, "no published run")
    errors = [(one.source, one.without_device if unseen else one.error) for one in some]
    low, high = quantiles(errors)
    median = float(np.median([abs(math.expm1(-error)) for _, error in errors]))
    return Interval(math.exp(low), math.exp(high), basis, median)


def interval_for(device: DeviceSpec, model: Architecture, trainer: TrainerSpec) -> Interval:
    """Return the interval of iteration times of a model on a device under a trainer and its precision.

    No published run has a measured table, so its interval is that of a device without runs. A blended table has the
    interval of the table before, because nobody knows by how much the user's measurements narrow it.
    """
    name = None if device.basis == "measured" else published_device(device.name)
    found = interval(name, model_kind(model), quantized=trainer.precision != "bf16")
    if device.basis == "blended":
        found = found._replace(basis=f"{found.basis}, with the table before it was blended")
    if trainer.name in TRAINERS:
        return found
    return found._replace(basis=f"{found.basis}; none by the trainer {trainer.name}")


def model_kind(model: Architecture) -> ModelKind:
    """Return the kind of a model: other if it has several modules, or reads no sequences, or has scans."""
    layers = [layer for module in model.modules for layer in module.layers]
    if len(model.modules) > 1 or model.modules[0].reads != "sequence" or any(map(has_scan, layers)):
        return "other"
    return "experts" if any(map(num_experts, layers)) else "dense"


def quantiles(pool: Iterable[tuple[str, float]]) -> tuple[float, float]:
    """Return the bounds that cover `COVERED` of the errors; every source has the same weight.

    Errors of one source are alike, so a source with many runs says little about another.
    """
    rows = sorted(pool, key=lambda row: row[1])
    runs = Counter(source for source, _ in rows)
    weight = np.cumsum([1 / runs[source] for source, _ in rows])
    at = (weight - weight[0] / 2) / weight[-1]
    low, high = np.interp([(1 - COVERED) / 2, (1 + COVERED) / 2], at, [error for _, error in rows])
    return float(low), float(high)


class Pair(NamedTuple):
    """Two published configurations of one source, model and device: logarithms of the ratios of their times a token."""

    model: tuple[str, str]
    """Source and model."""
    predicted: float
    published: float
    weight: float


@cache
def pairs() -> tuple[Pair, ...]:
    """Return all pairs of published runs that differ in configuration. Pairs of one source and model weigh less."""
    runs = {run.id: run for run in published_runs()}
    groups: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for one in residuals():
        run = runs[one.id]
        published = math.log(run.per_token(run.measured_s or 1.0))
        groups[one.source, one.model, one.device].append((published - one.error, published))
    found = []
    for (source, model, _), group in groups.items():
        some = [(a[0] - b[0], a[1] - b[1]) for a, b in combinations(group, 2)]
        different = [(predicted, published) for predicted, published in some if predicted and published]
        found += [Pair((source, model), *pair, len(different) ** -0.5) for pair in different]
    return tuple(found)


class SignCurve(NamedTuple):
    """How often groups of pairs had the predicted sign, by their predicted difference, which grows."""

    log_gap: FloatArray
    """Logarithm of the difference, itself that of a logarithm, shape (num_groups,)."""
    share: FloatArray
    """Weighted share of pairs with the predicted sign, shape (num_groups,)."""
    num_pairs: IntArray
    """Number of pairs, shape (num_groups,)."""

    def at(self, gap: float) -> Chance:
        """Return the probability that a predicted difference of two logarithms has the right sign."""
        place = math.log(abs(gap))
        nearest = int(np.abs(self.log_gap - place).argmin())
        probability = max(0.5, float(np.interp(place, self.log_gap, self.share)))
        return Chance(probability, int(self.num_pairs[nearest]))


def sign_curve(some: Sequence[Pair]) -> SignCurve:
    """Group pairs by their predicted difference. No group has the sign more rarely than one of smaller differences.

    This is isotonic regression by pooling adjacent violators (Barlow et al. 1972), of groups of `FEWEST_PAIRS`.
    """
    predicted, published, weight = np.array([pair[1:] for pair in some]).T
    order = np.argsort(np.abs(predicted), kind="stable")
    groups: list[tuple[IntArray, float]] = []
    for members in np.array_split(order, max(1, len(order) // FEWEST_PAIRS)):
        groups.append((members, _share_right(members, predicted * published > 0, weight)))
        while len(groups) > 1 and groups[-2][1] >= groups[-1][1]:
            both = np.concatenate([groups.pop()[0], groups.pop()[0]])
            groups.append((both, _share_right(both, predicted * published > 0, weight)))
    log_gap = np.log(np.abs(predicted))
    return SignCurve(
        np.array([np.average(log_gap[some], weights=weight[some]) for some, _ in groups]),
        np.array([share for _, share in groups]),
        np.array([len(some) for some, _ in groups]),
    )


def _share_right(members: IntArray, right: npt.NDArray[np.bool_], weight: FloatArray) -> float:
    return float(np.average(right[members], weights=weight[members]))


def chance(ratio: float) -> Chance:
    """Return the probability that a configuration is faster, if its time is predicted to be ``ratio`` of another's.

    It is how often published pairs that were predicted to differ by as much differed in this direction. It grows with
    the difference.
    """
    gap = abs(math.log(ratio)) if ratio > 0 else 0.0
    if gap == 0:
        return Chance(0.5, 0)
    return _curve().at(gap)


@cache
def _curve() -> SignCurve:
    return sign_curve(pairs())
