"""Hardware: accelerators and clusters of them, as the emulator sees them; a pipeline rank, as the planner does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pipeloom.bounds import Count, Factor, Latency, Magnitude, Number, NumBytes, Rate, RateOrNone, Seconds
from pipeloom.errors import InputError, check_not_negative, check_positive

Link = Literal["nvlink", "nic", "pcie"]
DevicePart = Literal["compute", "nvlink", "nic", "pcie"]
Points = Factor | tuple[tuple[Seconds, Factor], ...]
"""An efficiency, or one that depends on how long an operator would take at the peak: points (seconds, efficiency).

So that one table says what devices of any speed reach: what keeps a kernel or a message from the peak takes about as
long on all of them.
"""
LONGEST_S = 1e3
"""Of a point of an efficiency; more is no time but a size."""

HOST_SHARE = 0.8
"""Part of a node's memory for offloaded activations; data loading, the system and pinned buffers have the rest."""


def check_points(name: str, points: Sequence[tuple[float, float]]) -> None:
    """Refuse an efficiency over times that is no function, or promises nothing; ``name`` says whose it is.

    Raises
    ------
    InputError
        When there is none, when times are not positive, rising and below `LONGEST_S`, or an efficiency is not positive
        and finite.
    """
    times = [time for time, _ in points]
    if not points or times != sorted(set(times)) or times[0] <= 0:
        raise InputError(name, f"seconds at the peak {times} are not positive and rising")
    if times[-1] > LONGEST_S:
        raise InputError(name, f"{times[-1]:g} s at the peak is above {LONGEST_S:g}", "divide sizes by the peak")
    for time, efficiency in points:
        check_positive(f"{name} at {time:g} s", efficiency)


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
    standing for every other kind; of operations, shares of what the device sustains. In a file it may be the name of
    one of the zoo's.
    """

    name: str
    basis: Literal["datasheet", "measured"]
    source: str
    flops_per_s: Rate
    memory_bytes: NumBytes
    memory_bytes_per_s: Rate
    nvlink_bytes_per_s: RateOrNone = 0.0
    nvlink_latency_s: Latency = 0.0
    pcie_bytes_per_s: RateOrNone = 0.0
    pcie_latency_s: Latency = 0.0
    sustained_flops_per_s: RateOrNone = 0.0
    """What long matrix products reach within the device's power; 0: the peak."""
    launch_s: Latency = 0.0
    """Least time from one operator to the next: what issuing a kernel takes."""
    jitter: Magnitude = 0.0
    """Relative standard deviation of the time of a pass from one run to the next."""
    error: str = "not known"
    """How far the table is off, and on what that was found."""
    reserved_bytes: NumBytes = 0
    """Memory that no tensor can have: the driver's context, communication buffers, fragmentation."""
    efficiency: dict[DevicePart, dict[str, EfficiencySpec]] = {}

    def __post_init__(self) -> None:
        """Refuse devices that cannot exist."""
        for name in ("flops_per_s", "memory_bytes", "memory_bytes_per_s"):
            check_positive(f"device {self.name!r}.{name}", getattr(self, name))
        links = ("nvlink_bytes_per_s", "nvlink_latency_s", "pcie_bytes_per_s", "pcie_latency_s")
        for name in (*links, "sustained_flops_per_s", "launch_s", "jitter", "reserved_bytes"):
            check_not_negative(f"device {self.name!r}.{name}", getattr(self, name))
        if self.sustained_flops_per_s > self.flops_per_s:
            raise InputError(
                f"device {self.name!r}.sustained_flops_per_s",
                f"{self.sustained_flops_per_s:g} is above the peak of {self.flops_per_s:g}",
            )

    @property
    def label(self) -> str:
        """Its name, and what its table rests on."""
        return f"{self.name} ({self.basis}, error {self.error})"

    @property
    def usable_bytes(self) -> int:
        """Memory that tensors can have."""
        return self.memory_bytes - self.reserved_bytes


class ClusterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster: equal nodes of equal devices. ``nic_bytes_per_s`` is per device and direction."""

    name: str
    source: str
    device: DeviceSpec
    devices_per_node: Count
    num_nodes: Count
    nic_bytes_per_s: Rate
    nic_latency_s: Latency = 5e-6
    host_memory_bytes: NumBytes = 0
    host_bytes_per_s: RateOrNone = 0.0
    """Of a node's memory, reads and writes together; 0: not known, and no limit to copies."""
    host_cores: Count | None = None
    """Of a node; None: not known."""

    def __post_init__(self) -> None:
        """Refuse empty clusters."""
        for name in ("devices_per_node", "num_nodes", "nic_bytes_per_s"):
            check_positive(f"cluster {self.name!r}.{name}", getattr(self, name))
        check_not_negative(f"cluster {self.name!r}.host_bytes_per_s", self.host_bytes_per_s)

    @property
    def copy_bytes_per_s(self) -> float:
        """Of each device's copies to its host, or back, where all devices of a node copy both ways at once."""
        share = self.host_bytes_per_s / self.devices_per_node / 2
        return min(self.device.pcie_bytes_per_s, share) if share else self.device.pcie_bytes_per_s

    @property
    def offload_bytes(self) -> int:
        """Host memory that each device may fill with offloaded activations: its share of `HOST_SHARE` of a node's."""
        return int(self.host_memory_bytes * HOST_SHARE) // self.devices_per_node

    @property
    def num_devices(self) -> int:
        """Devices in all nodes."""
        return self.devices_per_node * self.num_nodes


class HostLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link between two hosts, or inside one: what it does between two of their ranks."""

    hosts: tuple[Number, Number]
    """Numbers of the hosts, the smaller first; the same twice: inside this one."""
    bytes_per_s: Rate
    latency_s: Seconds

    def __post_init__(self) -> None:
        """Refuse links that cannot exist."""
        if not 0 <= self.hosts[0] <= self.hosts[1]:
            raise InputError("link.hosts", f"{list(self.hosts)} are not two numbers from 0, the smaller first")
        check_positive(f"link of hosts {list(self.hosts)}: bytes_per_s", self.bytes_per_s)
        check_not_negative(f"link of hosts {list(self.hosts)}: latency_s", self.latency_s)

    @property
    def line(self) -> tuple[float, float]:
        """Seconds of an empty message, and seconds per byte."""
        return self.latency_s, 1.0 / self.bytes_per_s


class RankSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the planner knows of the hardware: the memory of every pipeline rank, and the link between any two.

    Links are numbered: 0 is the one for all pairs of ranks of which nothing else is known, then come ``links``.

    A training file has it as its table ``[cluster]``; of a `ClusterSpec`, `EmulatedCosts` makes it.
    """

    name: str = "local"
    memory_capacity_bytes: NumBytes | None = None
    """Memory of each rank; None: no limit."""
    host_capacity_bytes: NumBytes | None = None
    """Of its host's memory, what each rank may fill with offloaded activations; None: no limit."""
    link_bytes_per_s: Rate = 1e9
    """Point-to-point bandwidth between two pipeline ranks."""
    link_latency_s: Seconds = 1e-4
    """Time of an empty message between two pipeline ranks."""
    hosts: tuple[Number, ...] = ()
    """Number of the host on which each pipeline rank is; beyond its end 0, so that empty says: all on one."""
    links: tuple[HostLink, ...] = ()
    """Links that are known by the hosts of their ends. A run over several hosts measures them at its start."""

    def __post_init__(self) -> None:
        """Refuse links and memories that cannot exist."""
        if self.memory_capacity_bytes is not None and self.memory_capacity_bytes <= 0:
            raise InputError("cluster.memory_capacity_bytes", f"{self.memory_capacity_bytes} is not positive")
        check_not_negative("cluster.host_capacity_bytes", self.host_capacity_bytes or 0)
        check_positive("cluster.link_bytes_per_s", self.link_bytes_per_s)
        check_not_negative("cluster.link_latency_s", self.link_latency_s)
        for host in self.hosts:
            check_not_negative("cluster.hosts", host)
        pairs = [link.hosts for link in self.links]
        if len(set(pairs)) < len(pairs):
            raise InputError("cluster.links", f"{list(map(list, pairs))} name a pair of hosts twice", "give each once")

    def link_between(self, first: int, second: int) -> int:
        """Number of the link between two ranks."""
        pair = host_pair(self.hosts, first, second)
        return next((number for number, link in enumerate(self.links, 1) if link.hosts == pair), 0)

    def transfer_s(self, num_bytes: int, link: int = 0) -> float:
        """Seconds that a message of ``num_bytes`` takes over a link."""
        if link:
            return self.links[link - 1].latency_s + num_bytes / self.links[link - 1].bytes_per_s
        return self.link_latency_s + num_bytes / self.link_bytes_per_s


def host_pair(hosts: Sequence[int], first: int, second: int) -> tuple[int, int]:
    """Hosts of two ranks, the smaller first; beyond the end of ``hosts`` they are 0."""
    a, b = (hosts[rank] if rank < len(hosts) else 0 for rank in (first, second))
    return min(a, b), max(a, b)
