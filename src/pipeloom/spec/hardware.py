"""Hardware: devices and clusters for the emulator, and pipeline ranks for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pipeloom.bounds import Count, Factor, Latency, Magnitude, Number, NumBytes, Rate, RateOrNone, Seconds
from pipeloom.conversion import check_fields
from pipeloom.errors import InputError, check_positive

Link = Literal["nvlink", "nic", "pcie"]
DevicePart = Literal["compute", "nvlink", "nic", "pcie"]
Points = Factor | tuple[tuple[Seconds, Factor], ...]
"""An efficiency, or points (seconds at the peak rate, efficiency) between which it is interpolated.

What keeps a kernel or message from the peak takes about as long on all devices. So one table over seconds applies to
devices of any speed.
"""
LONGEST_S = 1e3
"""Largest seconds of an efficiency point. A larger value is probably a size."""

HOST_SHARE = 0.8
"""Share of a node's memory for offloaded activations. Data loading, the system and pinned buffers use the rest."""


def check_points(name: str, points: Sequence[tuple[float, float]]) -> None:
    """Check the points of an efficiency; ``name`` names it in errors.

    Raise `InputError` if there are no points, times are not positive, increasing and below `LONGEST_S`, or an
    efficiency is not positive and finite.
    """
    times = [time for time, _ in points]
    if not points or times != sorted(set(times)) or times[0] <= 0:
        raise InputError(name, f"seconds at the peak {times} are not positive and rising")
    if times[-1] > LONGEST_S:
        raise InputError(name, f"{times[-1]:g} s at the peak is above {LONGEST_S:g}", "divide sizes by the peak")
    for time, efficiency in points:
        check_positive(f"{name} at {time:g} s", efficiency)


class EfficiencySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Share of each peak rate that one kind of operator reaches. The default is 1."""

    flops: Points = 1.0
    memory: Points = 1.0
    network: Points = 1.0
    extra_keys: Magnitude = 0.0
    """Keys that each query of an attention costs in addition to those that it attends to."""

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "network"):
            check_points(f"efficiency.{name}", self.curve(name))

    def curve(self, metric: str) -> tuple[tuple[float, float], ...]:
        """Return the points of ``flops``, ``memory`` or ``network``. A single one applies everywhere."""
        points: Points = getattr(self, metric)
        return ((1.0, points),) if isinstance(points, float) else points


class GenerationSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What training on devices of one generation adds to the times of kernels that run alone on a cool device."""

    name: str = ""
    source: str = ""
    sustained: Factor = 1.0
    """Share of the efficiencies of operations that long training reaches within the power limit."""
    sustained_fp8: Magnitude = 0.0
    """The same of FP8 and FP4 products. 0: that of bfloat16."""
    flash2: Factor = 1.0
    """Speed of FlashAttention 2, relative to the attention of the device's table."""


class DeviceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator and its own links.

    ``basis`` is ``measured`` if the table was measured on the device, ``datasheet`` if it is from the data sheet with
    assumed or published efficiencies, or ``blended`` if measurements of a user moved another table (`pipeloom calibrate
    --base`). ``flops_per_s`` is dense bfloat16 (float32 on a CPU). Links are per direction. ``efficiency`` has shares
    of the peak by part (compute, nvlink, nic, pcie) and kind of operator; ``*`` is every other kind. Shares of
    operations are relative to the sustained rate. In a file it may be the name of an entry of the zoo.
    """

    name: str
    basis: Literal["datasheet", "measured", "blended"]
    source: str
    flops_per_s: Rate
    memory_bytes: NumBytes
    memory_bytes_per_s: Rate
    nvlink_bytes_per_s: RateOrNone = 0.0
    nvlink_latency_s: Latency = 0.0
    pcie_bytes_per_s: RateOrNone = 0.0
    pcie_latency_s: Latency = 0.0
    generation: GenerationSpec = GenerationSpec()
    sustained_flops_per_s: RateOrNone = 0.0
    """Operations per second of long matrix products within the device's power limit. 0: the generation's share of the
    peak."""
    fp8_flops_per_s: RateOrNone = 0.0
    """Peak of dense FP8 products. 0: the device has none."""
    sustained_fp8_flops_per_s: RateOrNone = 0.0
    """The same within the power limit. 0: the generation's share of the peak."""
    fp4_flops_per_s: RateOrNone = 0.0
    """Peak of dense FP4 products. Devices that have them multiply with scales of blocks (MXFP8, NVFP4) too."""
    sustained_fp4_flops_per_s: RateOrNone = 0.0
    """The same within the power limit. 0: the generation's share of the peak of quantized products."""
    launch_s: Latency = 0.0
    """Minimum time from one operator to the next, to launch a kernel."""
    jitter: Magnitude = 0.0
    """Relative standard deviation of the time of a pass between runs."""
    error: str = "not known"
    """Error of the table, and the experiment that measured it."""
    reserved_bytes: NumBytes = 0
    """Memory that tensors cannot use: the driver's context, communication buffers, fragmentation."""
    efficiency: dict[DevicePart, dict[str, EfficiencySpec]] = {}

    def __post_init__(self) -> None:
        check_fields(self, f"device {self.name!r}")
        check_positive(f"device {self.name!r}.memory_bytes", self.memory_bytes)
        for name in ("flops_per_s", "fp8_flops_per_s", "fp4_flops_per_s"):
            peak, sustained = getattr(self, name), getattr(self, f"sustained_{name}")
            if sustained > peak:
                raise InputError(
                    f"device {self.name!r}.sustained_{name}", f"{sustained:g} is above the peak of {peak:g}"
                )

    @property
    def quantized_products(self) -> dict[str, tuple[float, float]]:
        """Peak and sustained share of quantized products, by their kind (`Quantization.products`)."""
        fp8, fp4 = self.fp8_flops_per_s, self.fp4_flops_per_s
        found = {}
        if fp8:
            rate = fp8, (self.sustained_fp8_flops_per_s / fp8 or self.generation.sustained_fp8 or self.sustained)
            found = dict.fromkeys(("fp8", "fp8_block", "mxfp8") if fp4 else ("fp8", "fp8_block"), rate)
        if fp4:
            share = self.generation.sustained_fp8 or self.sustained
            found["nvfp4"] = fp4, (self.sustained_fp4_flops_per_s / fp4 or share)
        return found

    @property
    def sustained(self) -> float:
        """Share of the efficiencies of operations that long training reaches."""
        return (
            self.sustained_flops_per_s / self.flops_per_s if self.sustained_flops_per_s else self.generation.sustained
        )

    @property
    def label(self) -> str:
        """Name of the device with the basis and error of its table."""
        return f"{self.name} ({self.basis}, error {self.error})"

    @property
    def usable_bytes(self) -> int:
        """Memory that tensors can use."""
        return self.memory_bytes - self.reserved_bytes


class ClusterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster of equal nodes with equal devices. ``nic_bytes_per_s`` is per device and direction."""

    name: str
    source: str
    device: DeviceSpec
    devices_per_node: Count
    num_nodes: Count
    nic_bytes_per_s: Rate
    nic_latency_s: Latency = 5e-6
    host_memory_bytes: NumBytes = 0
    host_bytes_per_s: RateOrNone = 0.0
    """Bandwidth of a node's memory, reads and writes together. 0: unknown, and copies are not limited by it."""
    host_cores: Count | None = None
    """Cores of a node; None: unknown."""

    def __post_init__(self) -> None:
        check_fields(self, f"cluster {self.name!r}")

    @property
    def copy_bytes_per_s(self) -> float:
        """Bandwidth of each device's copies in one direction, while all devices of a node copy in both."""
        share = self.host_bytes_per_s / self.devices_per_node / 2
        return min(self.device.pcie_bytes_per_s, share) if share else self.device.pcie_bytes_per_s

    @property
    def offload_bytes(self) -> int:
        """Host memory of each device for offloaded activations: its share of `HOST_SHARE` of a node's memory."""
        return int(self.host_memory_bytes * HOST_SHARE) // self.devices_per_node

    @property
    def num_devices(self) -> int:
        """Devices in all nodes."""
        return self.devices_per_node * self.num_nodes


class HostLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link between ranks of two hosts, or of one host."""

    hosts: tuple[Number, Number]
    """Numbers of the hosts, the smaller first. Twice the same number: between ranks of this host."""
    bytes_per_s: Rate
    latency_s: Seconds

    def __post_init__(self) -> None:
        if not 0 <= self.hosts[0] <= self.hosts[1]:
            raise InputError("link.hosts", f"{list(self.hosts)} are not two numbers from 0, the smaller first")
        check_fields(self, f"link of hosts {list(self.hosts)}")

    @property
    def line(self) -> tuple[float, float]:
        """Seconds of an empty message, and seconds per byte."""
        return self.latency_s, 1.0 / self.bytes_per_s


class RankSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The planner's view of the hardware: the memory of every pipeline rank, and the link between any two ranks.

    Links are numbered. Link 0 connects all pairs of ranks without an entry in ``links``; the others follow in order.

    A training file has these fields in its table ``[cluster]``. `EmulatedCosts` derives them from a `ClusterSpec`.
    """

    name: str = "local"
    memory_capacity_bytes: NumBytes | None = None
    """Memory of each rank; None: no limit."""
    host_capacity_bytes: NumBytes | None = None
    """Host memory that each rank may fill with offloaded activations; None: no limit."""
    link_bytes_per_s: Rate = 1e9
    """Point-to-point bandwidth between two pipeline ranks."""
    link_latency_s: Seconds = 1e-4
    """Time of an empty message between two pipeline ranks."""
    hosts: tuple[Number, ...] = ()
    """Host number of each pipeline rank. Ranks beyond its end are on host 0, so empty means one host."""
    links: tuple[HostLink, ...] = ()
    """Links between given hosts. A run over several hosts measures them at its start."""

    def __post_init__(self) -> None:
        if self.memory_capacity_bytes is not None and self.memory_capacity_bytes <= 0:
            raise InputError("cluster.memory_capacity_bytes", f"{self.memory_capacity_bytes} is not positive")
        check_fields(self, "cluster")
        pairs = [link.hosts for link in self.links]
        if len(set(pairs)) < len(pairs):
            raise InputError("cluster.links", f"{list(map(list, pairs))} name a pair of hosts twice", "give each once")

    def link_between(self, first: int, second: int) -> int:
        """Return the number of the link between two ranks."""
        pair = host_pair(self.hosts, first, second)
        return next((number for number, link in enumerate(self.links, 1) if link.hosts == pair), 0)

    def transfer_s(self, num_bytes: int, link: int = 0) -> float:
        """Return the seconds of a message of ``num_bytes`` over a link."""
        if link:
            return self.links[link - 1].latency_s + num_bytes / self.links[link - 1].bytes_per_s
        return self.link_latency_s + num_bytes / self.link_bytes_per_s


def host_pair(hosts: Sequence[int], first: int, second: int) -> tuple[int, int]:
    """Return the hosts of two ranks, the smaller first. Ranks beyond the end of ``hosts`` are on host 0."""
    a, b = (hosts[rank] if rank < len(hosts) else 0 for rank in (first, second))
    return min(a, b), max(a, b)
