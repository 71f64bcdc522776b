"""Measured or assumed costs of single layers (`pipeloom.layers/1`), the input of co-optimization."""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeloom.bounds import Microbatches, NumBytes, Ranks, Seconds
from pipeloom.errors import InputError, check_count

BYTES_PER_PARAMETER = 2
"""Bytes of a parameter in ``parameter_bytes``: half precision."""
ADAM_STATIC_BYTES = 18
"""Bytes per parameter with mixed-precision Adam: weight, gradient, and three numbers in single precision."""


class StrategyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One memory strategy in a file. Its backward fields depend on the form of the pair."""

    strategy: str
    forward_s: Seconds
    activation_bytes: NumBytes
    backward_s: Seconds | None = None
    backward_input_s: Seconds | None = None
    backward_weight_s: Seconds | None = None
    weight_gradient_bytes: NumBytes | None = None
    layers: tuple[str, ...] | None = None
    host_bytes: NumBytes = 0


class LayerCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Costs of one layer on one microbatch."""

    name: str
    forward_s: Seconds
    activation_bytes: NumBytes
    parameter_bytes: NumBytes
    backward_s: Seconds | None = None
    """Seconds of the whole backward, if its parts are unknown. Such a layer is never split."""
    backward_input_s: Seconds | None = None
    backward_weight_s: Seconds | None = None
    static_bytes: NumBytes | None = None
    """Bytes of weights, gradients and optimizer state; None: those of mixed-precision Adam."""
    candidates: tuple[StrategyEntry, ...] | None = None
    update_s: Seconds = 0.0
    """Seconds after the last task of its rank, to reduce gradients and update weights."""

    def __post_init__(self) -> None:
        """Raise `InputError` for impossible numbers, and unless there is exactly one form of the backward."""
        for name in ("forward_s", "backward_s", "backward_input_s", "backward_weight_s", "update_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise InputError(name, f"{value:g} is {'negative' if value < 0 else 'not finite'}")
        for name in ("activation_bytes", "parameter_bytes", "static_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**62:
                raise InputError(name, "is negative" if value < 0 else "is not below 2**62")
        whole, parts = self.backward_s is not None, (self.backward_input_s, self.backward_weight_s)
        if whole == any(part is not None for part in parts) or (not whole and None in parts):
            raise InputError(
                "backward_s", "or both backward_input_s and backward_weight_s are required", "give either, not both"
            )

    @property
    def total_backward_s(self) -> float:
        """Seconds of the whole backward."""
        if self.backward_s is not None:
            return self.backward_s
        return (self.backward_input_s or 0.0) + (self.backward_weight_s or 0.0)

    @property
    def held_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state, with the default."""
        if self.static_bytes is not None:
            return self.static_bytes
        return self.parameter_bytes // BYTES_PER_PARAMETER * ADAM_STATIC_BYTES


class LayerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chain of layers with their costs, and the pipeline that will run it."""

    name: str
    num_ranks: Ranks
    num_microbatches: Microbatches
    boundary_s: Seconds
    """Seconds of the boundary transfer between two ranks."""
    boundary_bytes: NumBytes
    layers: tuple[LayerCost, ...]
    memory_capacity_bytes: tuple[NumBytes, ...] | None = None
    format: Literal["pipeloom.layers/1"] = "pipeloom.layers/1"

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches"):
            check_count(name, getattr(self, name))
        if not 0 <= self.boundary_s < float("inf"):
            raise InputError("boundary_s", f"{self.boundary_s:g} is not finite and at least 0")
        if self.boundary_bytes < 0:
            raise InputError("boundary_bytes", f"{self.boundary_bytes} is negative")
        if not self.layers:
            raise InputError("layers", "is empty", "give at least one layer")
        capacity = self.memory_capacity_bytes
        if capacity is not None and len(capacity) != self.num_ranks:
            raise InputError("memory_capacity_bytes", f"has {len(capacity)} entries, num_ranks is {self.num_ranks}")
        for rank, value in enumerate(capacity or ()):
            if not 0 <= value < 2**62:
                raise InputError(f"memory_capacity_bytes[{rank}]", f"{value} is not in 0..2**62-1")
