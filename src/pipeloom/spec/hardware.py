"""Hardware as the emulator sees it: accelerators, and clusters of nodes that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pipeloom.errors import InputError, check_count, check_not_negative, check_positive

Link = Literal["nvlink", "nic", "pcie"]
Part = Literal["compute", "nvlink", "nic", "pcie"]
Points = float | tuple[tuple[float, float], ...]
"""An efficiency, or one that depends on the size: points (size, efficiency)."""


def check_points(name: str, points: Sequence[tuple[float, float]]) -> None:
    """Refuse an efficiency over sizes that is no function, or promises nothing; ``name`` says whose it is.

    Raises
    ------
    InputError
        When there is none, when sizes are not positive and rising, or an efficiency is not positive and finite.
    """
    sizes = [size for size, _ in points]
    if not points or sizes != sorted(set(sizes)) or sizes[0] <= 0:
        raise InputError(name, f"sizes {sizes} are not positive and rising")
    for size, efficiency in points:
        check_positive(f"{name} at {size:g}", efficiency)


class EfficiencySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Share of each peak that one kind of operator reaches; 1 where left out."""

    flops: Points = 1.0
    memory: Points = 1.0
    network: Points = 1.0

    def __post_init__(self) -> None:
        """Refuse efficiencies that are not positive, and points out of order."""
        for name in ("flops", "memory", "network"):
            value: Points = getattr(self, name)
            check_points(f"efficiency.{name}", ((1.0, value),) if isinstance(value, float) else value)


class DeviceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator with the links that it has of its own.

    ``basis`` says whether the table was measured on the device or put together from its data sheet, with
    efficiencies assumed. ``flops_per_s`` is dense bfloat16 (float32 on a CPU); links are per direction.
    ``efficiency`` goes from part (compute, nvlink, nic, pcie) to operator kind to shares of the peak, ``*``
    standing for every other kind.
    """

    name: str
    basis: Literal["datasheet", "measured"]
    source: str
    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float = 0.0
    nvlink_latency_s: float = 0.0
    pcie_bytes_per_s: float = 0.0
    pcie_latency_s: float = 0.0
    reserved_bytes: int = 0
    """Memory that no tensor can have: the driver's context, communication buffers, fragmentation."""
    efficiency: dict[Part, dict[str, EfficiencySpec]] = {}

    def __post_init__(self) -> None:
        """Refuse devices that cannot exist."""
        for name in ("flops_per_s", "memory_bytes", "memory_bytes_per_s"):
            check_positive(f"device {self.name!r}.{name}", getattr(self, name))
        for name in ("nvlink_bytes_per_s", "nvlink_latency_s", "pcie_bytes_per_s", "pcie_latency_s",
                     "reserved_bytes"):  # fmt: skip
            check_not_negative(f"device {self.name!r}.{name}", getattr(self, name))

    @property
    def usable_bytes(self) -> int:
        """Memory that tensors can have."""
        return self.memory_bytes - self.reserved_bytes


class MachineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster: equal nodes of equal devices. ``nic_bytes_per_s`` is per device and direction."""

    name: str
    source: str
    device: DeviceSpec
    devices_per_node: int
    num_nodes: int
    nic_bytes_per_s: float
    nic_latency_s: float = 5e-6
    host_memory_bytes: int = 0
    host_cores: int = 0

    def __post_init__(self) -> None:
        """Refuse empty clusters."""
        for name in ("devices_per_node", "num_nodes", "nic_bytes_per_s"):
            check_positive(f"cluster {self.name!r}.{name}", getattr(self, name))

    @property
    def num_devices(self) -> int:
        """Devices in all nodes."""
        return self.devices_per_node * self.num_nodes


class Degrees(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Degrees of parallelism. Data, expert and context parallelism lie between tensor and pipeline.

    ``expert`` divides the experts over so many devices among those of one data-parallel replica group;
    ``zero``: 0 nothing is sharded over data parallelism, 1 the optimiser's state, 3 gradients and weights too.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = True
    zero: Literal[0, 1, 3] = 1

    def __post_init__(self) -> None:
        """Refuse degrees below one."""
        for name in ("tensor", "pipeline", "data", "context", "expert"):
            check_count(f"degrees.{name}", getattr(self, name))
        if (self.data * self.context * self.tensor) % self.expert:
            raise InputError("degrees.expert", f"{self.expert} does not divide data x context x tensor")

    @property
    def num_devices(self) -> int:
        """Devices that these degrees need."""
        return self.tensor * self.pipeline * self.data * self.context
