"""Costs from layers measured on the machine that trains (PipeTune A.4's way, one fit per kind of layer)."""

from __future__ import annotations

import itertools
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError, check_not_negative
from pipeloom.spec import LayerSpec, Workload

Coefficients = tuple[float, float, float, float]
"""Of one, instances, tokens, token pairs."""


class StrategyMeasurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one layer on one workload takes beyond keeping everything and a whole backward; medians, and exact bytes."""

    input_gradient_s: float
    weight_gradient_s: float
    """The two halves of a split backward."""
    weight_gradient_bytes: int
    """Held between the two, without the layer's own arguments."""
    selective_forward_s: float
    selective_backward_s: float
    """Its recomputation included."""
    selective_bytes: int
    """Held in between, without the layer's own arguments."""
    offload_s: float
    load_s: float
    """Moving what is saved, without the layer's own arguments, to the host and back."""
    given_bytes: int
    """The layer's arguments and its module's context, which are held from forward to backward."""
    unsaved_bytes: int
    """Those of them that autograd does not save, so that ``activation_bytes`` lacks them."""
    workspace_bytes: int
    """Most that its forward or backward uses beyond what is held, its output included."""
    forward_workspace_bytes: int | None = None
    """The same of its forward alone; None: as much."""
    backward_workspace_bytes: int | None = None
    """The same of a whole backward alone."""

    def __post_init__(self) -> None:
        """Refuse what no measurement gives."""
        for name in self.__struct_fields__:
            if getattr(self, name) is not None:
                check_not_negative(f"measurement.{name}", getattr(self, name))


class StrategyFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each number of `StrategyMeasurement` as a sum over a workload's features."""

    input_gradient_s: Coefficients
    weight_gradient_s: Coefficients
    weight_gradient_bytes: Coefficients
    selective_forward_s: Coefficients
    selective_backward_s: Coefficients
    selective_bytes: Coefficients
    offload_s: Coefficients
    load_s: Coefficients
    given_bytes: Coefficients
    unsaved_bytes: Coefficients
    workspace_bytes: Coefficients
    forward_workspace_bytes: Coefficients | None = None
    backward_workspace_bytes: Coefficients | None = None


class LayerMeasurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer timed on one workload: medians of repeated runs."""

    module: str
    kind: str
    lengths: tuple[int, ...]
    forward_s: float
    backward_s: float
    activation_bytes: int
    strategies: StrategyMeasurement | None = None
    """None: not measured."""

    def __post_init__(self) -> None:
        """Refuse what no measurement gives."""
        for name in ("forward_s", "backward_s", "activation_bytes"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise InputError(f"measurement of {self.module}.{self.kind}.{name}", f"{value} is not finite and >= 0")


class LayerFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of a kind of layer as a non-negative sum over a workload's features.

    Each quadruple holds the coefficients of: one, instances, tokens, token pairs. The constant is what
    a layer costs however small its input; token pairs are attention.
    """

    forward_s: Coefficients
    backward_s: Coefficients
    activation_bytes: Coefficients
    strategies: StrategyFit | None = None
    """None: not measured; then there are ``keep`` and ``recompute``, and whole backwards."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fitted costs of every kind of layer of a model, as measured on one machine."""

    machine: str
    layers: dict[str, LayerFit]
    """Key: ``module/kind``."""
    typical_s: dict[str, float] = {}
    """Key as above: seconds of one such layer, forward and backward, on a typical batch; balances layouts."""
    mean_error: float = 0.0
    """Mean relative error of forward plus backward on the measurements themselves."""
    format: Literal["pipeloom.profile/1"] = "pipeloom.profile/1"

    def load(self, module: str, layer: LayerSpec) -> float:
        """Seconds of one layer on a typical batch, as layouts are balanced by."""
        key = f"{module}/{layer.kind}"
        if key not in self.typical_s:
            raise InputError(f"profile.typical_s[{key!r}]", "is missing", "profile the model on some batches")
        return self.typical_s[key]


def fit_profile(measurements: list[LayerMeasurement], machine: str) -> Profile:
    """Fit one `LayerFit` per kind of layer.

    Raises
    ------
    InputError
        When there is nothing to fit.
    """
    if not measurements:
        raise InputError("measurements", "is empty", "measure every kind of layer on at least one workload")
    groups: dict[str, list[LayerMeasurement]] = {}
    for row in measurements:
        groups.setdefault(f"{row.module}/{row.kind}", []).append(row)
    layers, errors = {}, []
    for key, rows in groups.items():
        features = np.array([workload_features(Workload(row.lengths)) for row in rows])
        forward, backward, activation = (
            np.array([getattr(row, name) for row in rows], dtype=float)
            for name in ("forward_s", "backward_s", "activation_bytes")
        )
        fit = LayerFit(
            _nonnegative_fit(features, forward),
            _nonnegative_fit(features, backward),
            _covering_fit(features, activation),
            _fit_strategies(features, rows),
        )
        layers[key] = fit
        predicted = features @ (np.array(fit.forward_s) + np.array(fit.backward_s))
        measured = forward + backward
        errors.extend(np.abs(predicted - measured) / np.maximum(measured, 1e-12))
    return Profile(machine=machine, layers=layers, mean_error=float(np.mean(errors)))


def _fit_strategies(features: npt.NDArray[np.float64], rows: list[LayerMeasurement]) -> StrategyFit | None:
    measured = [row.strategies for row in rows if row.strategies is not None]
    if len(measured) < len(rows):
        return None
    fits: dict[str, Coefficients] = {}
    for name in StrategyFit.__struct_fields__:
        column = [getattr(row, name) for row in measured]
        if None not in column:
            fit = _covering_fit if name.endswith("_bytes") else _nonnegative_fit
            fits[name] = fit(features, np.array(column, dtype=float))
    return StrategyFit(**fits)


def workload_features(workload: Workload) -> Coefficients:
    """What costs are sums over: one, instances, tokens, token pairs."""
    return (1.0, float(workload.num_instances), float(workload.num_tokens), float(workload.num_token_pairs))


def _covering_fit(features: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> Coefficients:
    """Fit bytes: raised so far that none of the measurements is above it, since plans are held to them.

    Measurements of nothing are left out: errors relative to nothing outweigh all others, and a fit of nothing at all,
    which they would bring about, cannot be raised.
    """
    some = target > 0
    if not some.any():
        return (0.0, 0.0, 0.0, 0.0)
    features, target = features[some], target[some]
    fit = np.array(_nonnegative_fit(features, target))
    # What takes bytes though all that the fit is of is nothing, as tokens of an empty sequence.
    fit[0] += target[features @ fit <= 0].max(initial=0.0)
    fit *= max(1.0, float((target / (features @ fit)).max()))
    return (float(fit[0]), float(fit[1]), float(fit[2]), float(fit[3]))


def _nonnegative_fit(features: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> Coefficients:
    """Least squares on relative errors with coefficients of at least zero.

    With four features all sixteen subsets are tried: exact, and no solver is needed.
    """
    weight = 1.0 / np.maximum(target, max(float(target.max()) * 1e-3, 1e-12))
    rows, goal = features * weight[:, None], target * weight
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    best, best_error = np.zeros(4), float(goal @ goal)
    # Bytes are exact sums: a further feature would fit the rounding, and go astray on other workloads. Where few were
    # measured, several subsets are exact: the likelier ones come first, tokens and a constant.
    exact = 1e-12 * best_error
    for size in range(1, 5):
        for subset in itertools.combinations((2, 0, 3, 1), size):
            if best_error <= exact:
                break
            columns = list(subset)
            solution = np.linalg.lstsq(rows[:, columns] / scale[columns], goal, rcond=None)[0]
            if (solution < 0).any():
                continue
            candidate = np.zeros(4)
            candidate[columns] = solution / scale[columns]
            residual = rows @ candidate - goal
            error = float(residual @ residual)
            # A further feature must earn its place, or noise would be extrapolated.
            if error < best_error * (1 - 1e-3):
                best, best_error = candidate, error
    return (float(best[0]), float(best[1]), float(best[2]), float(best[3]))
