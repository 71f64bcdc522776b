"""`OperatorGraph`: operators and tensors on devices, and their emulation (PipeWeaver §4.1).

Operators are issued in the order in which they are added. This order is topological, because an operator can only refer
to existing operators and tensors. The graph stores flat arrays; `OperatorGraph.operator` and `OperatorGraph.tensor` are
readable views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeloom.emulator.rules import Device, IntArray, RuleTable
from pipeloom.emulator.size import FloatArray
from pipeloom.errors import InputError
from pipeloom.lazy import lazy_module

if TYPE_CHECKING:
    from pipeloom.emulator import kernels
else:
    kernels = lazy_module("pipeloom.emulator.kernels")

NO_OPERATOR = -1


class OperatorView(NamedTuple):
    """Readable view of one operator."""

    name: str
    kind: str
    device: str
    flops: float
    memory_bytes: float
    network_bytes: float
    after: tuple[int, ...]


class TensorView(NamedTuple):
    """Readable view of one tensor. ``producer`` is -1 if it exists from the start."""

    name: str
    device: str
    num_bytes: int
    producer: int
    readers: tuple[int, ...]
    kept: bool


@dataclass(frozen=True, eq=False)
class OperatorGraph:
    """Operators in issue order and the tensors between them. Create it with a `GraphBuilder`.

    Attributes
    ----------
    names, kinds : per operator
    device, steps, pieces : array, shape (num_operators,)
    amounts : float array, shape (num_operators, 3)
        Operations, memory bytes, network bytes.
    predecessor_start, predecessor : compressed rows
    tensor_names : per tensor
    tensor_device, tensor_bytes, producer, kept : array, shape (num_tensors,)
        A tensor lives from the start of its producer to the end of the last operator that reads it. A ``kept`` tensor
        outlives the graph (parameters, tensors saved for the backward).
    readers : per tensor a tuple of operators
    """

    devices: tuple[Device, ...]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    device: IntArray
    steps: FloatArray
    pieces: FloatArray
    amounts: FloatArray
    predecessor_start: IntArray
    predecessor: IntArray
    tensor_names: tuple[str, ...]
    tensor_device: IntArray
    tensor_bytes: IntArray
    producer: IntArray
    kept: IntArray
    readers: tuple[tuple[int, ...], ...]

    @property
    def num_operators(self) -> int:
        """Number of operators."""
        return len(self.names)

    def operator(self, number: int) -> OperatorView:
        """Return a readable view of one operator."""
        begin, end = self.predecessor_start[number], self.predecessor_start[number + 1]
        f, m, n = map(float, self.amounts[number])
        return OperatorView(
            self.names[number],
            self.kinds[number],
            self.devices[int(self.device[number])].name,
            f,
            m,
            n,
            tuple(self.predecessor[begin:end].tolist()),
        )

    def tensor(self, number: int) -> TensorView:
        """Return a readable view of one tensor."""
        return TensorView(
            self.tensor_names[number],
            self.devices[int(self.tensor_device[number])].name,
            int(self.tensor_bytes[number]),
            int(self.producer[number]),
            self.readers[number],
            bool(self.kept[number]),
        )


class Amounts(NamedTuple):
    """Amounts of one operator. ``steps`` counts consecutive messages, ``pieces`` the equal kernels in which it runs."""

    flops: float = 0.0
    memory_bytes: float = 0.0
    network_bytes: float = 0.0
    steps: float = 0.0
    pieces: float = 1.0


class GraphBuilder:
    """Adds operators and tensors one by one, and builds an `OperatorGraph`."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._number = {device.name: i for i, device in enumerate(self._devices)}
        self._operators: list[tuple[str, str, int, Amounts, tuple[int, ...]]] = []
        self._tensors: list[tuple[str, int, int, int, bool]] = []
        self._readers: list[list[int]] = []

    def tensor(self, name: str, device: str, num_bytes: int, *, producer: int = NO_OPERATOR, kept: bool = False) -> int:
        """Add a tensor and return its number. Without a producer it exists from the start."""
        if num_bytes < 0:
            raise InputError(f"tensor {name!r}", f"{num_bytes} bytes is negative")
        if not NO_OPERATOR <= producer < len(self._operators):
            raise InputError(f"tensor {name!r}", f"producer {producer} does not exist yet", "add it first")
        self._tensors.append((name, self._device(name, device), num_bytes, producer, kept))
        self._readers.append([])
        return len(self._tensors) - 1

    def operator(
        self,
        name: str,
        kind: str,
        device: str,
        amounts: Amounts,
        *,
        reads: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> int:
        """Add an operator and return its number.

        Parameters
        ----------
        reads : tensors
            Each lives until the operator ends, and its producer precedes the operator.
        after : operators
            Further predecessors.
        """
        number = len(self._operators)
        for metric, value in zip(("flops", "memory_bytes", "network_bytes"), amounts, strict=False):
            if not 0 <= value < float("inf"):
                raise InputError(f"operator {name!r}.{metric}", f"{value} is not finite and at least 0")
        before = set(after)
        for tensor in reads:
            if not 0 <= tensor < len(self._tensors):
                raise InputError(f"operator {name!r}", f"reads tensor {tensor}, which does not exist")
            self._readers[tensor].append(number)
            before.add(self._tensors[tensor][3])
        before.discard(NO_OPERATOR)
        if before and not 0 <= min(before) <= max(before) < number:
            raise InputError(f"operator {name!r}", f"waits for {max(before)}, which does not exist yet", "add it first")
        self._operators.append((name, kind, self._device(name, device), amounts, tuple(sorted(before))))
        return number

    def _device(self, user: str, name: str) -> int:
        if name not in self._number:
            raise InputError(f"{user!r}.device", f"{name!r} is unknown", f"there are {', '.join(self._number)}")
        return self._number[name]

    def build(self) -> OperatorGraph:
        """Build the graph."""
        operators, tensors = self._operators, self._tensors
        start = np.zeros(len(operators) + 1, np.int64)
        np.cumsum([len(op[4]) for op in operators], out=start[1:])
        return OperatorGraph(
            devices=self._devices,
            names=tuple(op[0] for op in operators),
            kinds=tuple(op[1] for op in operators),
            device=np.array([op[2] for op in operators], np.int64),
            steps=np.array([op[3].steps for op in operators], np.float64),
            pieces=np.array([op[3].pieces for op in operators], np.float64),
            amounts=np.array([op[3][:3] for op in operators], np.float64).reshape(-1, 3),
            predecessor_start=start,
            predecessor=np.array([p for op in operators for p in op[4]], np.int64),
            tensor_names=tuple(t[0] for t in tensors),
            tensor_device=np.array([t[1] for t in tensors], np.int64),
            tensor_bytes=np.array([t[2] for t in tensors], np.int64),
            producer=np.array([t[3] for t in tensors], np.int64),
            kept=np.array([t[4] for t in tensors], np.bool_),
            readers=tuple(tuple(r) for r in self._readers),
        )


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Bytes in use on one device: ``num_bytes[i]`` from ``time_ps[i]`` on. Memory that ends at t is free at t."""

    time_ps: IntArray
    num_bytes: IntArray

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes in use at once."""
        return int(self.num_bytes.max(initial=0))


@dataclass(frozen=True, eq=False)
class Emulation:
    """Start and end of every operator, and the memory of its tensors."""

    graph: OperatorGraph
    start_ps: IntArray
    end_ps: IntArray

    @property
    def makespan_ps(self) -> int:
        """End of the last operator."""
        return int(self.end_ps.max(initial=0))

    def memory(self, device: str) -> MemoryCurve:
        """Return the memory curve of one device, from the lifetimes of its tensors."""
        graph = self.graph
        own = np.flatnonzero(graph.tensor_device == [d.name for d in graph.devices].index(device))
        begin = np.where(graph.producer[own] < 0, 0, self.start_ps[graph.producer[own]] if self.start_ps.size else 0)
        finish = np.array([self._last_use(int(t)) for t in own], np.int64)
        return memory_curve(graph.tensor_bytes[own], begin, finish)

    def _last_use(self, tensor: int) -> int:
        graph = self.graph
        if graph.kept[tensor]:
            return FOREVER
        users = [u for u in (int(graph.producer[tensor]), *graph.readers[tensor]) if u >= 0]
        return max((int(self.end_ps[u]) for u in users), default=0)


FOREVER = 1 << 60


def memory_curve(num_bytes: IntArray, begin_ps: IntArray, end_ps: IntArray) -> MemoryCurve:
    """Return the sum of bytes alive at each time. Tensors live in [begin, end); `FOREVER` never ends."""
    ends = end_ps < FOREVER
    time = np.concatenate([begin_ps, end_ps[ends]])
    change = np.concatenate([num_bytes, -num_bytes[ends]])
    order = np.argsort(time, kind="stable")
    times, first = np.unique(time[order], return_index=True)
    level = np.cumsum(change[order])
    # One entry per time, after all changes at that time: memory that ends at t is free at t.
    last = np.append(first[1:], len(time)) - 1
    return MemoryCurve(times, level[last] if len(time) else level)


def emulate_graph(graph: OperatorGraph) -> Emulation:
    """Compute start and end of every operator: in issue order, one at a time per device, overlapping across devices.

    Raises
    ------
    InputError
        If an operator needs a metric that its device does not have (network bytes on a compute device).
    """
    table = RuleTable(graph.devices, graph.kinds, graph.device, graph.steps, graph.pieces)
    duration = table.durations_ps(graph.amounts)
    free = np.zeros(len(graph.devices), np.int64)
    end: IntArray = kernels.issue(
        graph.device, graph.predecessor_start, graph.predecessor, duration, free, np.zeros(1, np.int64)
    )
    return Emulation(graph, end - duration, end)
