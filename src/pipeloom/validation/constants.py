"""Constants of the emulator that are fitted to published runs, and their values without some of these runs.

Kernel tables say how fast a kernel is when it runs alone on a cool device. Training adds a few things that no kernel
table has: clocks under the power limit, the host's launches, eager operators, collectives that computation hides. Each
is one constant with a physical meaning and a value that other sources suggest (``data/constants.toml``). The fit
starts from these values and moves them as far as the runs demand.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pipeloom.bounds import Factor
from pipeloom.emulator.fit import robust_posterior
from pipeloom.spec.catalog import load_generation, load_trainer
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.trainer import TrainerSpec
from pipeloom.validation.express import ExpressedRun
from pipeloom.validation.runs import DATA

FloatArray = npt.NDArray[np.float64]
Values = Mapping[str, float]
"""Value of every constant, by its name."""
TYPICAL_ERROR = 0.06
"""Errors above it count linearly in the fit, not by their square, so that single runs cannot bend a constant."""
EVIDENCE = 0.3
"""Weight of a run whose source and model have no other, relative to a measurement with `TYPICAL_ERROR`: runs of other
models share their source's way of measuring."""


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fitted constant. ``targets`` are fields of files of the zoo; ``share`` is whether it lies between 0 and 1."""

    name: str
    targets: tuple[str, ...]
    prior: Factor
    spread: Factor
    source: str
    share: bool = False

    def to_line(self, value: float) -> float:
        """Return the value on a scale without bounds: its logarithm, or that of the odds of a share."""
        return float(np.log(value / (1 - value) if self.share else value))

    def from_line(self, value: float) -> float:
        """Return a value from that scale."""
        return float(1 / (1 + np.exp(-value)) if self.share else np.exp(value))


class FittedRun(NamedTuple):
    """A run of the fit."""

    id: str
    source: str
    device: str
    model: str
    kind: str
    error: float
    """Logarithm of published over predicted time, with the shipped constants."""
    slopes: tuple[float, ...]
    """Derivative of the logarithm of the predicted time by each constant (on its scale without bounds)."""


@cache
def constants() -> tuple[Constant, ...]:
    """Return the fitted constants."""
    content = msgspec.toml.decode((DATA / "constants.toml").read_bytes())
    return msgspec.convert(content["constants"], tuple[Constant, ...])


@cache
def shipped() -> dict[str, float]:
    """Return the values of the constants in the zoo."""
    return {constant.name: _zoo_value(constant.targets[0]) for constant in constants()}


def _zoo_value(target: str) -> float:
    entry, field = target.rsplit(".", 1)
    kind, name = entry.split("/")
    value: float = getattr(load_generation(name) if kind == "generations" else load_trainer(name), field)
    return value


def with_values(expressed: ExpressedRun, values: Values) -> ExpressedRun:
    """Return a run with other values of the constants."""
    changes = {
        target: (value, value / shipped()[constant.name])
        for constant in constants()
        if (value := values[constant.name]) != shipped()[constant.name]
        for target in constant.targets
    }
    if not changes:
        return expressed
    cluster, trainer = _with_generation(expressed.cluster, changes), expressed.trainer
    zoo = load_trainer(trainer.name)
    for field in TrainerSpec.__struct_fields__:
        # Fields that the run does not use are 0 or differ from the zoo's.
        value, _ = changes.get(f"trainers/{trainer.name}.{field}", (0.0, 1.0))
        if value and getattr(trainer, field) == getattr(zoo, field):
            trainer = msgspec.structs.replace(trainer, **{field: value})
    return replace(expressed, cluster=cluster, trainer=trainer)


def _with_generation(cluster: ClusterSpec, changes: Mapping[str, tuple[float, float]]) -> ClusterSpec:
    device = cluster.device
    generation = device.generation
    if not any(target.startswith(f"generations/{generation.name}.") for target in changes):
        return cluster
    for field in ("sustained", "sustained_fp8", "flash2"):
        value, ratio = changes.get(f"generations/{generation.name}.{field}", (0.0, 1.0))
        if value:
            generation = msgspec.structs.replace(generation, **{field: value})
            peak = {"sustained": "flops_per_s", "sustained_fp8": "fp8_flops_per_s"}.get(field, "")
            if peak and (own := getattr(device, f"sustained_{peak}")):
                rate = min(getattr(device, peak), own * ratio)
                device = msgspec.structs.replace(device, **{f"sustained_{peak}": rate})
    return msgspec.structs.replace(cluster, device=msgspec.structs.replace(device, generation=generation))


@cache
def fitted_runs() -> tuple[FittedRun, ...]:
    """Return the runs of the fit, as ``scripts/fit_constants.py`` recorded them."""
    rows = list(csv.reader((DATA / "fit.csv").read_text().splitlines()))
    names = [constant.name for constant in constants()]
    if rows[0][6:] != names:
        raise ValueError(
            f"fit.csv has the constants {rows[0][6:]}, constants.toml {names}; run scripts/fit_constants.py"
        )
    return tuple(
        FittedRun(i, source, device, model, kind, float(error), tuple(map(float, slopes)))
        for i, source, device, model, kind, error, *slopes in rows[1:]
    )


@cache
def fitted_ids() -> frozenset[str]:
    """Return the names of the runs of the fit."""
    return frozenset(run.id for run in fitted_runs())


def refit(runs: Sequence[FittedRun], start: Values) -> dict[str, float]:
    """Fit the constants to runs, whose errors and slopes belong to the values ``start``.

    Minimizes the Huber loss of the errors plus the squared distances from the priors. All runs of one source and model
    together weigh as much as the root of their number.
    """
    every = constants()
    begin = np.array([one.to_line(start[one.name]) for one in every])
    prior = np.array([one.to_line(one.prior) for one in every])
    precision = np.array([one.spread**-2 for one in every])
    if runs:
        slopes, errors = np.array([run.slopes for run in runs]), np.array([run.error for run in runs])
        alike = Counter((run.source, run.model) for run in runs)
        weight = np.array([alike[run.source, run.model] ** -0.5 for run in runs]) * EVIDENCE / TYPICAL_ERROR**2
    else:
        slopes, errors, weight = np.zeros((0, len(every))), np.zeros(0), np.zeros(0)
    step = robust_posterior(slopes, errors, weight, TYPICAL_ERROR, np.diag(precision), prior - begin)
    return {one.name: one.from_line(x) for one, x in zip(every, begin + step, strict=True)}


@cache
def values_without(field: str, value: str) -> dict[str, float]:
    """Return the constants fitted without the runs whose ``field`` (device, source or model) is ``value``."""
    return refit([run for run in fitted_runs() if getattr(run, field) != value], shipped())
