"""Degrees of parallelism of layouts and of emulated runs."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from pipeloom.bounds import Count
from pipeloom.conversion import check_fields
from pipeloom.errors import InputError


class StateBytes(NamedTuple):
    """Bytes of a parameter's accumulated gradient and of its optimizer state."""

    gradient: int = 4
    optimizer: int = 12


MIXED_PRECISION = StateBytes()
"""Mixed-precision Adam: a float32 gradient, a float32 copy of the weight and two float32 moments."""


class Parallelism(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensor and data parallel degrees. The layout has the number of pipeline ranks."""

    tensor: Count = 1
    data: Count = 1

    def __post_init__(self) -> None:
        check_fields(self, type(self).__name__.lower())


class Degrees(Parallelism, frozen=True, forbid_unknown_fields=True):
    """All degrees of an emulated run. Data, expert and context parallelism are between tensor and pipeline.

    ``expert`` divides the experts among this many devices of one data-parallel group, and ``expert_tensor`` each expert
    among as many. Without expert parallelism, tensor parallelism divides each expert. ``zero`` 0 shards nothing over
    data parallelism, 1 the optimizer state, 3 also gradients and weights. ``state`` has the bytes of these for each
    parameter.
    """

    pipeline: Count = 1
    context: Count = 1
    expert: Count = 1
    expert_tensor: Count = 1
    sequence_parallel: bool = True
    zero: Literal[0, 1, 3] = 1
    state: StateBytes = MIXED_PRECISION

    def __post_init__(self) -> None:
        """Raise `InputError` for degrees below one, and if ``expert`` does not divide the replicas."""
        Parallelism.__post_init__(self)
        if (self.data * self.context * self.tensor) % self.expert:
            raise InputError("degrees.expert", f"{self.expert} does not divide data x context x tensor")
        if self.expert > 1 and (self.data * self.context * self.tensor // self.expert) % self.expert_tensor:
            problem = f"{self.expert_tensor} does not divide data x context x tensor over {self.expert} expert-parallel"
            raise InputError("degrees.expert_tensor", problem, "lower it, or use 1")

    @property
    def expert_data(self) -> int:
        """Number of devices that hold the same part of the experts, with expert parallelism."""
        return self.data * self.context * self.tensor // (self.expert * self.expert_tensor)

    @property
    def shards(self) -> tuple[int, int]:
        """Number of devices over which the state of dense weights and of experts is divided."""
        dense = self.data * self.context
        return dense, max(1, self.expert_data) if self.expert > 1 else dense

    @property
    def num_devices(self) -> int:
        """Number of devices that these degrees need."""
        return self.tensor * self.pipeline * self.data * self.context
