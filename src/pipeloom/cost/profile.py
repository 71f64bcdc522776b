"""Costs from layers measured on the machine that trains (PipeTune A.4's way, one fit per kind of layer)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from pipeloom.cost.model import StrategyCost
from pipeloom.errors import InputError
from pipeloom.spec import DTYPE_BYTES, Chunk, ClusterSpec, LayerSpec, ModelSpec, Workload

Strategy = Literal["keep", "recompute"]

# Weights, gradients and two moments of Adam, each as large as the weights.
_STATIC_COPIES = 4


class LayerMeasurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer timed on one workload: medians of repeated runs."""

    module: str
    kind: str
    lengths: tuple[int, ...]
    forward_s: float
    backward_s: float
    activation_bytes: int

    def __post_init__(self) -> None:
        """Refuse what no measurement gives."""
        for name in ("forward_s", "backward_s", "activation_bytes"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise InputError(
                    f"measurement of {self.module}.{self.kind}.{name}", f"{value} is not finite and >= 0"
                )


class LayerFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of a kind of layer as a non-negative sum over a workload's features.

    Each quadruple holds the coefficients of: one, instances, tokens, token pairs. The constant is what
    a layer costs however small its input; token pairs are attention.
    """

    forward_s: tuple[float, float, float, float]
    backward_s: tuple[float, float, float, float]
    activation_bytes: tuple[float, float, float, float]


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
        features = np.array([_features(Workload(row.lengths)) for row in rows])
        forward, backward, activation = (
            np.array([getattr(row, name) for row in rows], dtype=float)
            for name in ("forward_s", "backward_s", "activation_bytes")
        )
        fit = LayerFit(
            _nonnegative_fit(features, forward),
            _nonnegative_fit(features, backward),
            _nonnegative_fit(features, activation),
        )
        layers[key] = fit
        predicted = features @ (np.array(fit.forward_s) + np.array(fit.backward_s))
        measured = forward + backward
        errors.extend(np.abs(predicted - measured) / np.maximum(measured, 1e-12))
    return Profile(machine=machine, layers=layers, mean_error=float(np.mean(errors)))


@dataclass(frozen=True)
class ProfileCosts:
    """CostModel from a `Profile`.

    Attributes
    ----------
    model : ModelSpec
    profile : Profile
    cluster : ClusterSpec
        Its links give the seconds of messages.
    strategies : tuple of {"keep", "recompute"}
        Memory strategies offered for every pair; the first is the base.
    factors : dict
        Per module, measured over predicted seconds of (forward, backward): what calibration learned while
        training ran. Absent means 1.
    """

    model: ModelSpec
    profile: Profile
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    strategies: tuple[Strategy, ...] = ("keep",)
    factors: dict[str, tuple[float, float]] = field(default_factory=dict)
    _layers: dict[str, tuple[LayerSpec, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check once that every layer was measured, so that planning cannot fail on it later."""
        object.__setattr__(self, "_layers", {m.name: m.flat_layers for m in self.model.modules})
        for name, layers in self._layers.items():
            for layer in layers:
                if f"{name}/{layer.kind}" not in self.profile.layers:
                    raise InputError(
                        f"profile.layers[{name + '/' + layer.kind!r}]",
                        "is missing",
                        "measure this kind of layer",
                    )

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        """Costs of a chunk under each offered strategy."""
        features = np.array(_features(workload))
        forward = backward = activation = 0.0
        for layer in self._chunk_layers(chunk):
            fit = self.profile.layers[f"{chunk.module}/{layer.kind}"]
            forward += float(features @ fit.forward_s)
            backward += float(features @ fit.backward_s)
            activation += float(features @ fit.activation_bytes)
        f_factor, b_factor = self.factors.get(chunk.module, (1.0, 1.0))
        forward, backward = forward * f_factor, backward * b_factor
        costs = {
            "keep": StrategyCost("keep", forward, backward, round(activation)),
            # Recomputing holds the chunk's input alone; a module's own input is data, and lives anyway.
            "recompute": StrategyCost(
                "recompute", forward, forward + backward, self._input_bytes(chunk, workload)
            ),
        }
        return tuple(costs[strategy] for strategy in self.strategies)

    def boundary_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Bytes of the chunk's output."""
        return self._chunk_layers(chunk)[-1].output.num_bytes(workload)

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds of a message between two ranks."""
        return self.cluster.transfer_s(num_bytes)

    def static_bytes(self, chunk: Chunk) -> int:
        """Weights, gradients and Adam's moments, in the dtype of the layer's output."""
        total = 0
        for layer in self._chunk_layers(chunk):
            item = DTYPE_BYTES[layer.output.dtype]
            total += layer.num_parameters * item * _STATIC_COPIES
        return total

    def _input_bytes(self, chunk: Chunk, workload: Workload) -> int:
        first = chunk.layers[0]
        return 0 if first == 0 else self._layers[chunk.module][first - 1].output.num_bytes(workload)

    def _chunk_layers(self, chunk: Chunk) -> tuple[LayerSpec, ...]:
        return self._layers[chunk.module][chunk.layers[0] : chunk.layers[1] + 1]


def _features(workload: Workload) -> tuple[float, float, float, float]:
    return (1.0, float(workload.num_instances), float(workload.num_tokens), float(workload.num_token_pairs))


def _nonnegative_fit(
    features: npt.NDArray[np.float64], target: npt.NDArray[np.float64]
) -> tuple[float, float, float, float]:
    """Least squares on relative errors with coefficients of at least zero.

    With four features all sixteen subsets are tried: exact, and no solver is needed.
    """
    weight = 1.0 / np.maximum(target, max(float(target.max()) * 1e-3, 1e-12))
    rows, goal = features * weight[:, None], target * weight
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    best, best_error = np.zeros(4), float(goal @ goal)
    for size in range(1, 5):
        for subset in itertools.combinations(range(4), size):
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
