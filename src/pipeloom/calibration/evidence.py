"""Evidence about a device: measured times of operators, with the counts that the emulator gives them.

Readers of files call the methods of `Evidence` with the sizes that a file states. What cannot be used is counted by
reason.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from pipeloom.emulator.build import local_devices
from pipeloom.emulator.collectives import all_reduce_cost, all_to_all_cost, ring
from pipeloom.emulator.fit import Measurement
from pipeloom.emulator.rules import FLOPS_KINDS, METRICS, Device, base_kind
from pipeloom.emulator.size import ONE
from pipeloom.emulator.tape import DEVICE_NAMES, NIC, NVLINK, Cost, Group
from pipeloom.errors import InputError, visible_line
from pipeloom.spec import Workload
from pipeloom.spec.catalog import load_cluster, load_device, names
from pipeloom.spec.hardware import ClusterSpec, DevicePart, DeviceSpec
from pipeloom.spec.plain_cluster import HOST
from pipeloom.validation.runs import PublishedRun

Direction = Literal["forward", "backward"]
ABOVE_PEAK = 1.05
"""Largest plausible share of a peak. Clocks above the data sheet's give a few percent; more is another device, a wrong
unit or a cache."""
IN_SWITCH = 2.0
"""Largest factor by which a switch that reduces (NVLink SHARP) beats the bytes that a ring sends."""
BELOW_CURVE = 2.0
"""How far below the first point of an efficiency curve an observation may be. The curve is flat there, so that smaller
ones would bend the points of larger ones."""
LARGEST_HOST = 16
"""Most devices of one host (HGX-2). Larger groups over NVLink span hosts."""
LONGEST_S = 1e3
"""Longest plausible time of one kernel or message."""
MOST_COUNT = 2**40
"""Largest plausible size of a tensor's dimension or of a message."""
BACKWARD_FLOPS = 2.5
"""Operations of attention's backward, relative to its forward: five products instead of two."""
_DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), ("", 2)),
    **dict.fromkeys(("fp8", "float8_e4m3fn", "float8_e5m2", "e4m3"), ("fp8", 1)),
    **dict.fromkeys(("fp8_block", "fp8_blockwise"), ("fp8_block", 1)),
    **dict.fromkeys(("mxfp8", "fp8_mx"), ("mxfp8", 1)),
    **dict.fromkeys(("float32", "fp32", "float"), ("float32", 4)),
    **dict.fromkeys(("float64", "fp64", "double"), ("float64", 8)),
}
"""Kind of products and bytes of a number, by the name of a precision in lower case without its module."""
_COLLECTIVES = {
    **dict.fromkeys(("all_reduce", "allreduce", "allreduce_coalesced"), "all_reduce"),
    **dict.fromkeys(("all_gather", "allgather", "_allgather_base", "all_gather_into_tensor"), "all_gather"),
    **dict.fromkeys(("allgather_into_tensor_coalesced",), "all_gather"),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor"), "reduce_scatter"),
    **dict.fromkeys(("reduce_scatter_tensor_coalesced",), "reduce_scatter"),
    **dict.fromkeys(("all_to_all", "alltoall", "all_to_all_single"), "all_to_all"),
    **dict.fromkeys(("send", "recv", "sendrecv", "p2p"), "send"),
}
"""Kind of operator by the names of nccl-tests, of PyTorch's traces and of tables."""
BUS_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Bus bandwidth over algorithm bandwidth by kind of operator, times n / (n - 1) of n devices. They are equal for
messages between two devices."""
_GPU = re.compile(r"(?<![A-Z0-9])(GH200|GB[23]00|[ABHVLT]\d{1,4}S?|RTX ?[A-Z0-9]+|MI\d{3}\w?)(?![0-9])", re.I)
_CAPABILITY = {"ampere": 80, "ada": 89, "hopper": 90, "blackwell": 100, "grace-blackwell": 100, "blackwell-ultra": 103}
"""Compute capability of a generation, as names of kernels write it."""


class Observation(NamedTuple):
    """A measured operator."""

    measurement: Measurement
    hot: bool = False
    """Whether it was measured in training, at the clocks that the power limit leaves. Benchmarks of single kernels are
    cool."""
    flash2: bool = False
    """Whether it is an attention of FlashAttention 2."""
    source: str = ""
    """Name of the file."""


@dataclass
class Evidence:
    """Observations of a device, and what could not be used."""

    base: DeviceSpec
    """Table of the device, which says what is physically possible."""
    per_node: int = 0
    """Devices that NVLink joins. 0: those of a node of ``cluster``, or else 72 for GB200 and GB300, otherwise 8."""
    cluster: ClusterSpec | None = None
    """Cluster whose network was measured, by iterations too. None: the network that the emulator assumes for the
    device."""
    observations: list[Observation] = field(default_factory=list)
    runs: list[tuple[str, PublishedRun]] = field(default_factory=list)
    """Measured iterations, each with the name of its file."""
    unusable: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of rows, lines or kernels that were not used, by the file's name and the reason."""
    kinds: dict[str, str] = field(default_factory=dict)
    """What each file was read as."""
    source: str = ""
    """Name of the file that is being read."""

    def __post_init__(self) -> None:
        """Set the number of devices that NVLink joins."""
        if not self.per_node and self.cluster is not None:
            self.per_node = self.cluster.devices_per_node
        elif not self.per_node:
            self.per_node = 72 if self.base.name.startswith(("GB200", "GB300")) else HOST

    @property
    def joins_hosts(self) -> bool:
        """Whether NVLink joins several hosts, so that the number of hosts does not tell the link."""
        return self.per_node > LARGEST_HOST

    @cached_property
    def network(self) -> ClusterSpec | None:
        """Cluster whose network counts; None if none is declared and the zoo lacks the device."""
        if self.cluster is not None:
            return self.cluster
        name = next((name for name in names("devices") if load_device(name).name == self.base.name), None)
        return load_cluster(f"2x8x{name}") if name else None

    @property
    def uses_network(self) -> bool:
        """Whether an observation or an iteration is between nodes."""
        return any(one.measurement.part == "nic" for one in self.observations) or any(
            (run.gpus or 0) > self.devices_per_node(run) for _, run in self.runs
        )

    def devices_per_node(self, run: PublishedRun) -> int:
        """Return the devices of a run that NVLink joins: those of whole racks, unless a cluster has smaller nodes."""
        whole_racks = self.cluster is None and self.joins_hosts
        return self.per_node if whole_racks else run.per_node or self.per_node

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Compute and links of the base table, in the order of `DEVICE_NAMES`, as the emulator has them."""
        rate, latency = (self.network.nic_bytes_per_s, self.network.nic_latency_s) if self.network else (1.0, 0.0)
        return local_devices(self.base, rate, latency)

    def reject(self, reason: str, count: int = 1) -> None:
        """Count what cannot be used."""
        self.unusable[self.source, reason] += count

    def product(
        self,
        sizes: Sequence[float],
        seconds: float,
        dtype: str,
        *,
        batch: float = 1,
        grouped: bool = False,
        hot: bool = False,
    ) -> None:
        """Add a matrix product of m x k and k x n numbers (``sizes`` are m, n, k), repeated ``batch`` times.

        ``grouped`` is whether the repetitions are products of experts in one kernel.
        """
        kind = self._precision(dtype)
        if kind is None or not self._plausible([*sizes, batch], seconds):
            return
        (variant, width), (m, n, k) = kind, sizes
        # Results are written in two bytes or more, whatever the precision of the operands.
        moved = batch * ((m * k + k * n) * width + m * n * max(width, 2))
        name = f"matmul {m:g} x {n:g} x {k:g}" + (f", {batch:g} times" if batch != 1 else "")
        flops = 2.0 * batch * m * n * k
        kind_name = "grouped_matmul" if grouped else "matmul"
        kind_name += f"@{variant}" if variant else ""
        self._add(Measurement(kind_name, name, seconds, flops=flops, memory_bytes=moved), hot=hot)

    def attention(
        self,
        shape: AttentionShape,
        seconds: float,
        dtype: str,
        *,
        direction: Direction = "forward",
        hot: bool = False,
        flash2: bool = False,
    ) -> None:
        """Add an attention."""
        precision = self._precision(dtype)
        if precision is None or not self._plausible(shape[:7], seconds):
            return None
        if precision[0] not in ("", "float32"):
            return self.reject(f"attention in {dtype}, which the emulator does not have")
        if shape.causal and shape.queries != shape.keys:
            return self.reject("causal attention with other numbers of queries and keys")
        kind = "causal_attention" if shape.causal else "attention"
        back = direction == "backward"
        kind = f"{kind}_backward@{shape.width:g}" if back else f"{kind}@{shape.width:g}"
        extra_keys = self.devices[0].efficiency_of(kind).extra_keys
        keys = (shape.keys + 1) / 2 if shape.causal else shape.keys
        flops = 2 * shape.batch * shape.heads * (shape.width + shape.value_width) * shape.queries * (keys + extra_keys)
        moved = shape.queries * shape.heads * (shape.width + shape.value_width)
        moved += shape.keys * shape.kv_heads * (shape.width + shape.value_width)
        measurement = Measurement(
            kind,
            f"{kind} {shape.batch:g} x {shape.queries:g} x {shape.heads:g}",
            seconds,
            flops=flops * (BACKWARD_FLOPS if back else 1),
            memory_bytes=shape.batch * moved * precision[1] * (2 if back else 1),
        )
        return self._add(measurement, hot=hot, flash2=flash2)

    def moved(self, kind: str, num_bytes: float, seconds: float, *, hot: bool = False) -> None:
        """Add an operator that memory limits: it reads and writes ``num_bytes`` in all."""
        if self._plausible([num_bytes], seconds):
            self._add(Measurement(kind, f"{kind} of {num_bytes:g} bytes", seconds, memory_bytes=num_bytes), hot=hot)

    def collective(
        self, name: str, num_bytes: float, seconds: float, ranks: float, *, nodes: float = 0, hot: bool = False
    ) -> None:
        """Add a collective of a group over ``nodes`` nodes; 0 stands for as few as possible.

        ``num_bytes`` is the size as nccl-tests counts it: of the reduced, gathered or scattered data as a whole; of an
        all-to-all or a message, what one rank sends.
        """
        kind = collective_kind(name)
        if kind is None:
            return self.reject(f"collective {shown(name) or 'without a name'}, which the emulator does not have")
        if ranks < 2:
            return self.reject("collective of fewer than two devices")
        if not self._plausible([num_bytes, ranks, nodes or 1], seconds):
            return None
        nodes = nodes or -(-ranks // self.per_node)
        if nodes > 1 and self.network is None:
            return self.reject("collective between nodes, of a device whose network the zoo lacks; give --cluster")
        if nodes == 1 and not self.base.nvlink_bytes_per_s:
            return self.reject("collective inside a node, of a device without such a link")
        cost = self._collective_cost(kind, num_bytes, int(ranks), int(nodes))
        part: DevicePart = "nvlink" if nodes == 1 else "nic"
        label = f"{kind} of {num_bytes:g} bytes, {ranks:g} devices"
        sent = cost.network.of(Workload((1,)))
        return self._add(
            Measurement(cost.rule, label, seconds, network_bytes=sent, part=part, steps=cost.steps), hot=hot
        )

    def measured(self, measurements: Sequence[Measurement]) -> None:
        """Add operators that were measured on this machine, with the emulator's counts."""
        for m in measurements:
            if m.kind == "norm" and m.name.endswith("gradients"):
                self.reject("gradients of a norm, which one kernel computes and the emulator counts twice")
                continue
            kind = f"{m.kind}@{m.variant}" if m.variant else m.kind
            extra_keys = self.devices[0].efficiency_of(kind).extra_keys
            flops = m.flops + m.flops_per_key * extra_keys
            self._add(msgspec.structs.replace(m, kind=kind, flops=flops), hot=False)

    def merge_repeats(self) -> None:
        """Keep one observation of each shape of a file, with the median of its times.

        A collective of a trace keeps the shortest time: the others contain the wait for the slowest device.
        """
        groups: dict[tuple[object, ...], list[Observation]] = defaultdict(list)
        for one in self.observations:
            m = one.measurement
            key = (m.kind, m.part, m.flops, m.memory_bytes, m.network_bytes, one.hot, one.flash2)
            groups[(*key, "" if one.hot and m.steps else one.source)].append(one)
        self.observations = []
        for same in groups.values():
            first, times = same[0], [one.measurement.seconds for one in same]
            seconds = min(times) if first.hot and first.measurement.steps else float(np.median(times))
            measurement = msgspec.structs.replace(first.measurement, seconds=seconds)
            self.observations.append(first._replace(measurement=measurement))

    def num_read(self, source: str) -> int:
        """Return how many observations and iterations come from a file."""
        return sum(one.source == source for one in self.observations) + sum(name == source for name, _ in self.runs)

    def _precision(self, dtype: str) -> tuple[str, int] | None:
        found = _dtype(dtype)
        # Rates of a CPU are those of float32, as `calibrate --device cpu` measures them.
        if found is not None and found[0] == "float32" and "cpu" in self.base.name.lower():
            return "", 4
        if found is None or (found[0] and found[0] not in self.base.quantized_products):
            self.reject(f"precision {shown(dtype)}, for which the table has no rate")
            return None
        return found

    def _plausible(self, sizes: Sequence[float], seconds: float) -> bool:
        if not all(1 <= size <= MOST_COUNT and size == int(size) for size in sizes):
            self.reject(f"size that is not a whole number from 1 to {MOST_COUNT}")
        elif not 0 < seconds <= LONGEST_S:
            self.reject(f"time that is not above 0 and at most {LONGEST_S:g} s")
        else:
            return True
        return False

    def _collective_cost(self, kind: str, num_bytes: float, ranks: int, nodes: int) -> Cost:
        group = Group(NVLINK, 1.0, ranks)
        if nodes > 1:
            local, network = max(1, ranks // nodes), self.devices[NIC].network_bytes_per_s
            group = Group(NIC, min(local, max(1.0, self.base.nvlink_bytes_per_s / network)), local)
        size = ONE * num_bytes
        if kind == "send":
            return Cost("send", network=size, device=group.device, steps=1)
        if kind == "all_to_all":
            return all_to_all_cost(size, ranks, group)
        return all_reduce_cost(size, ranks, group) if kind == "all_reduce" else ring(kind, size, ranks, group)

    def _add(self, m: Measurement, *, hot: bool, flash2: bool = False) -> None:
        """Add an observation that physics allows."""
        if m.part == "compute" and m.seconds < self.base.launch_s:
            return self.reject(f"shorter than the launch of a kernel ({self.base.launch_s:g} s), which hides its rate")
        device = self.devices[DEVICE_NAMES.index(m.part)]
        amounts = (m.flops, m.memory_bytes if base_kind(m.kind) not in FLOPS_KINDS else 0.0, m.network_bytes)
        peaks = zip(amounts, device.rates_of(m.kind), strict=True)
        limit = ABOVE_PEAK * (IN_SWITCH if base_kind(m.kind) == "all_reduce" else 1.0)
        if any(amount > limit * rate * m.seconds for amount, rate in peaks):
            return self.reject(f"above {limit:g} of the device's peak: another device, a wrong unit or a cache")
        curve = device.efficiency_of(m.kind).curve(m.metric)
        at_peak = m.amount / device.rates_of(m.kind)[METRICS.index(m.metric)]
        if len(curve) > 1 and at_peak < curve[0][0] / BELOW_CURVE:
            return self.reject("smaller than the sizes for which the table has efficiencies")
        self.observations.append(Observation(m, hot, flash2, self.source))
        return None


class AttentionShape(NamedTuple):
    """Sizes of an attention: samples, queries and keys of each, heads, and widths of a head."""

    batch: float
    queries: float
    keys: float
    heads: float
    kv_heads: float
    width: float
    value_width: float
    causal: bool


def collective_kind(name: str) -> str | None:
    """Return the kind of operator of a collective; None if the emulator does not have it."""
    return _COLLECTIVES.get(name.lower().removesuffix("_perf"))


def bus_share(name: str, ranks: float) -> float:
    """Return bus bandwidth over algorithm bandwidth of a collective, as nccl-tests defines them."""
    factor = BUS_FACTORS.get(collective_kind(name) or "")
    return factor * (ranks - 1) / max(ranks, 1) if factor else 1.0


def bytes_of(dtype: str) -> int:
    """Return the bytes of a number in the precision ``dtype``; raise `ValueError` if it is unknown."""
    found = _dtype(dtype)
    if found is None:
        raise ValueError(f"precision {shown(dtype)}, whose bytes are not known")
    return found[1]


def _dtype(name: str) -> tuple[str, int] | None:
    return _DTYPES.get(name.lower().rpartition(".")[2].rpartition("::")[2].replace("-", "_") or "bfloat16")


def other_device(stated: str, base: DeviceSpec) -> bool:
    """Return whether ``stated`` is the name of another GPU than that of ``base``, or one is a CPU and one a GPU."""
    found, own = _chip(stated), _chip(base.name)
    if not found or not own:
        return False
    if found != own:
        return True
    # The same chip as a card of PCIe has a lower power limit and slower links.
    return ("PCIE" in stated.upper()) != ("PCIE" in base.name.upper())


def _chip(name: str) -> str:
    """Return the name of a GPU's chip, ``CPU``, or an empty string if a name has neither."""
    if "CPU" in name.upper():
        return "CPU"
    found = _GPU.search(name)
    return found[1].upper() if found else ""


def newer_kernels(kernels: Sequence[str], base: DeviceSpec) -> str:
    """Return a kernel for a newer generation than the table's, which its device cannot run; empty if there is none."""
    newest = _CAPABILITY.get(base.generation.name)
    for name in kernels if newest else ():
        found = re.search(r"sm_?(\d{2,3})(?!\d)", name)
        if found is not None and newest is not None and int(found[1]) > newest:
            return name
    return ""


def shown(name: str) -> str:
    """Return the beginning of a name from a file, without control characters."""
    return visible_line(name)[:60]


def nothing_usable(evidence: Evidence) -> InputError:
    """Return the error of evidence without anything usable."""
    reasons = [f"{count} x {reason}" for (_, reason), count in evidence.unusable.most_common(4)]
    looked = "kernels with shapes, collectives with sizes, or measured iterations"
    files = ", ".join(f"{name} ({kind})" for name, kind in evidence.kinds.items())
    return InputError(
        files or "evidence", f"has nothing usable: {'; '.join(reasons) or 'it is empty'}", f"give {looked}"
    )
