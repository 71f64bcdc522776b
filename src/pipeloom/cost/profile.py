"""Costs of layers measured on the training machine, with one fit per kind of layer (PipeTune A.4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import numpy as np

from pipeloom.bounds import ByteCoefficients, Magnitude, Seconds, SecondsCoefficients
from pipeloom.cost.fits import Coefficients, FloatArray, aligned, fit_bytes, fit_most, fit_seconds, workload_features
from pipeloom.errors import InputError, check_not_negative
from pipeloom.limits import NUM_OWN_FEATURES
from pipeloom.spec import LayerSpec, Workload


class StrategyMeasurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements of one layer on one workload for strategies and split backwards: median seconds and exact bytes."""

    input_gradient_s: float
    weight_gradient_s: float
    """Seconds of the two halves of a split backward."""
    weight_gradient_bytes: int
    """Bytes held between the two halves, without the layer's own arguments."""
    selective_forward_s: float
    selective_backward_s: float
    """Seconds of the backward with its recomputation."""
    selective_bytes: int
    """Bytes held from forward to backward, without the layer's own arguments."""
    offload_s: float
    load_s: float
    """Seconds to move saved tensors, without the layer's own arguments, to the host and back."""
    given_bytes: int
    """Bytes of the layer's arguments and its module's context, which are held from forward to backward."""
    unsaved_bytes: int
    """Bytes of these that autograd does not save. ``activation_bytes`` does not include them."""
    workspace_bytes: int
    """Peak bytes of its forward or backward beyond held tensors, output included."""
    forward_workspace_bytes: int | None = None
    """The same for its forward alone; None: use ``workspace_bytes``."""
    backward_workspace_bytes: int | None = None
    """The same for a whole backward alone."""
    forward_moments: tuple[int, ...] = ()
    """Bytes after each operation of its forward, beyond those that will be held. Empty: not measured."""
    backward_moments: tuple[int, ...] = ()
    """The same for a whole backward, beyond those that were held."""
    weight_moments: tuple[int, ...] = ()
    """The same for the second half of a split backward."""
    first_moments: tuple[int, ...] = ()
    """The same for a whole backward that allocates the gradients of the layer's weights."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not name.endswith("_moments") and getattr(self, name) is not None:
                check_not_negative(f"measurement.{name}", getattr(self, name))


class StrategyFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each number of `StrategyMeasurement` as a sum over a workload's features.

    Moments have several sums; the largest counts.
    """

    input_gradient_s: SecondsCoefficients
    weight_gradient_s: SecondsCoefficients
    weight_gradient_bytes: ByteCoefficients
    selective_forward_s: SecondsCoefficients
    selective_backward_s: SecondsCoefficients
    selective_bytes: ByteCoefficients
    offload_s: SecondsCoefficients
    load_s: SecondsCoefficients
    given_bytes: ByteCoefficients
    unsaved_bytes: ByteCoefficients
    workspace_bytes: ByteCoefficients
    forward_workspace_bytes: ByteCoefficients | None = None
    backward_workspace_bytes: ByteCoefficients | None = None
    forward_moments: tuple[ByteCoefficients, ...] = ()
    backward_moments: tuple[ByteCoefficients, ...] = ()
    weight_moments: tuple[ByteCoefficients, ...] = ()
    first_moments: tuple[ByteCoefficients, ...] = ()

    @property
    def forward_peaks(self) -> tuple[Coefficients, ...]:
        """Sums of which the largest is the peak of its forward beyond held tensors."""
        return self.forward_moments or (self.forward_workspace_bytes or self.workspace_bytes,)

    @property
    def backward_peaks(self) -> tuple[Coefficients, ...]:
        """The same for a whole backward."""
        return self.backward_moments or (self.backward_workspace_bytes or self.workspace_bytes,)

    @property
    def half_peaks(self) -> tuple[Coefficients, ...]:
        """The same for either half of a split backward, and for all other passes."""
        every = (*self.forward_moments, *self.backward_moments, *self.weight_moments)
        return every or (self.workspace_bytes,)


class LayerMeasurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements of one layer on one workload: medians of repeated runs."""

    module: str
    kind: str
    lengths: tuple[int, ...]
    forward_s: float
    backward_s: float
    activation_bytes: int
    strategies: StrategyMeasurement | None = None
    """None: not measured."""
    given: tuple[tuple[int, int], ...] = ()
    """As in `Workload`."""

    @property
    def workload(self) -> Workload:
        """Workload of the measurement."""
        return Workload(self.lengths, self.given)

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "activation_bytes"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise InputError(f"measurement of {self.module}.{self.kind}.{name}", f"{value} is not finite and >= 0")


class LayerFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of a kind of layer as sums over a workload's features.

    Coefficients are of: one, instances, tokens, token pairs. Bytes may also have coefficients of instances and tokens
    from each module that feeds this one. The constant is the cost of a layer with tiny inputs; token pairs are
    attention. Coefficients of bytes may be negative, their sum is not.
    """

    forward_s: SecondsCoefficients
    backward_s: SecondsCoefficients
    activation_bytes: ByteCoefficients
    strategies: StrategyFit | None = None
    """None: not measured. Then only ``keep``, ``recompute`` and whole backwards are available."""
    recompute_s: SecondsCoefficients | None = None
    """Seconds by which the backward is longer under ``recompute``. None: those of the forward."""

    def of_bytes(self) -> Iterator[tuple[str, Coefficients]]:
        """Yield path and coefficients of every field of bytes."""
        yield "activation_bytes", self.activation_bytes
        for name in () if self.strategies is None else self.strategies.__struct_fields__:
            value = getattr(self.strategies, name)
            if name.endswith("_moments"):
                yield from ((f"strategies.{name}[{i}]", each) for i, each in enumerate(value))
            elif name.endswith("_bytes") and value is not None:
                yield f"strategies.{name}", value


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fitted costs of every kind of layer of a model, measured on one machine."""

    machine: str
    layers: dict[str, LayerFit]
    """Fits by ``module/kind``."""
    typical_s: dict[str, Seconds] = {}
    """Seconds of one layer, forward and backward, on a typical batch, by ``module/kind``. Used to balance layouts."""
    mean_error: Magnitude = 0.0
    """Mean relative error of forward plus backward on the measurements."""
    copies_overlap: bool = False
    """Whether copies to the host and back run beside computation, as on an accelerator. On the CPU they do not."""
    format: Literal["pipeloom.profile/1"] = "pipeloom.profile/1"

    def load(self, module: str, layer: LayerSpec) -> float:
        """Return the seconds of one layer on a typical batch, to balance layouts."""
        key = f"{module}/{layer.kind}"
        if key not in self.typical_s:
            raise InputError(f"profile.typical_s[{key!r}]", "is missing", "profile the model on some batches")
        return self.typical_s[key]


def fit_profile(measurements: list[LayerMeasurement], machine: str) -> Profile:
    """Fit one `LayerFit` per kind of layer. Raise `InputError` without measurements."""
    if not measurements:
        raise InputError("measurements", "is empty", "measure every kind of layer on at least one workload")
    groups: dict[str, list[LayerMeasurement]] = {}
    for row in measurements:
        groups.setdefault(f"{row.module}/{row.kind}", []).append(row)
    layers, errors = {}, []
    for key, rows in groups.items():
        features = aligned([workload_features(row.workload) for row in rows])
        forward, backward, activation = (
            np.array([getattr(row, name) for row in rows], dtype=float)
            for name in ("forward_s", "backward_s", "activation_bytes")
        )
        fit = LayerFit(
            fit_seconds(features, forward),
            fit_seconds(features, backward),
            fit_bytes(features, activation),
            _fit_strategies(features, rows),
        )
        layers[key] = fit
        predicted = features[:, :NUM_OWN_FEATURES] @ (np.array(fit.forward_s) + np.array(fit.backward_s))
        measured = forward + backward
        errors.extend(np.abs(predicted - measured) / np.maximum(measured, 1e-12))
    return Profile(machine=machine, layers=layers, mean_error=float(np.mean(errors)))


def _fit_strategies(features: FloatArray, rows: list[LayerMeasurement]) -> StrategyFit | None:
    measured = [row.strategies for row in rows if row.strategies is not None]
    if len(measured) < len(rows):
        return None
    fits: dict[str, Any] = {}
    for name in StrategyFit.__struct_fields__:
        column = [getattr(row, name) for row in measured]
        if name.endswith("_moments"):
            fits[name] = fit_most(features, column) if all(column) else ()
        elif None not in column:
            fit = fit_bytes if name.endswith("_bytes") else fit_seconds
            fits[name] = fit(features, np.array(column, dtype=float))
    return StrategyFit(**fits)
