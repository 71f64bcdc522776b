"""Hardware: accelerators and clusters of them, as the emulator sees them; a pipeline rank, as the planner does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pipeloom.errors import InputError, check_not_negative, check_positive

Link = Literal["nvlink", "nic", "pcie"]
DevicePart = Literal["compute", "nvlink", "nic", "pcie"]
Points = float | tuple[tuple[float, float], ...]
"""An efficiency, or one that depends on the size: points (size, efficiency)."""


HOST_SHARE = 0.8
"""Part of a node's memory for offloaded activations; data loading, the system and pinned buffers have the rest."""


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
    efficiency: dict[DevicePart, dict[str, EfficiencySpec]] = {}

    def __post_init__(self) -> None:
        """Refuse devices that cannot exist."""
        for name in ("flops_per_s", "memory_bytes", "memory_bytes_per_s"):
            check_positive(f"device {self.name!r}.{name}", getattr(self, name))
        for name in ("nvlink_bytes_per_s", "nvlink_latency_s", "pcie_bytes_per_s", "pcie_latency_s", "reserved_bytes"):
            check_not_negative(f"device {self.name!r}.{name}", getattr(self, name))

    @property
    def usable_bytes(self) -> int:
        """Memory that tensors can have."""
        return self.memory_bytes - self.reserved_bytes


class ClusterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    def offload_bytes(self) -> int:
        """Host memory that each device may fill with offloaded activations: its share of `HOST_SHARE` of a node's."""
        return int(self.host_memory_bytes * HOST_SHARE) // self.devices_per_node

    @property
    def num_devices(self) -> int:
        """Devices in all nodes."""
        return self.devices_per_node * self.num_nodes


class RankSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the planner knows of the hardware: the memory of every pipeline rank, and the link between any two.

    A training file has it as its table ``[cluster]``; of a `ClusterSpec`, `EmulatedCosts` makes it.
    """

    name: str = "local"
    memory_capacity_bytes: int | None = None
    """Memory of each rank; None: no limit."""
    host_capacity_bytes: int | None = None
    """Of its host's memory, what each rank may fill with offloaded activations; None: no limit."""
    link_bytes_per_s: float = 1e9
    """Point-to-point bandwidth between two pipeline ranks."""
    link_latency_s: float = 1e-4
    """Time of an empty message between two pipeline ranks."""

    def __post_init__(self) -> None:
        """Refuse links and memories that cannot exist."""
        if self.memory_capacity_bytes is not None and self.memory_capacity_bytes <= 0:
            raise InputError("cluster.memory_capacity_bytes", f"{self.memory_capacity_bytes} is not positive")
        check_not_negative("cluster.host_capacity_bytes", self.host_capacity_bytes or 0)
        check_positive("cluster.link_bytes_per_s", self.link_bytes_per_s)
        check_not_negative("cluster.link_latency_s", self.link_latency_s)

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds that a message of ``num_bytes`` takes between two ranks."""
        return self.link_latency_s + num_bytes / self.link_bytes_per_s
