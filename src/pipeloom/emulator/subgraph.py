"""Reusable subgraphs: nested, repeated, replicated, exact (PipeWeaver §4.2).

A `Leaf` is a run of operators with known durations on its own (local) devices. A `Composite` is a run of calls of other
subgraphs. By the timing rule of the kernels, both are max-plus matrices from the times at which devices and inputs are
ready to the times at which devices are free and outputs are ready.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeloom.emulator.rules import IntArray
from pipeloom.errors import InputError
from pipeloom.lazy import lazy_module
from pipeloom.totals import check_total, summable

if TYPE_CHECKING:
    from pipeloom.emulator import kernels
else:
    kernels = lazy_module("pipeloom.emulator.kernels")

INPUT = -1


class Port(NamedTuple):
    """Output ``port`` of call ``call``. Call `INPUT` is the input port ``port`` of the enclosing subgraph."""

    call: int
    port: int = 0


@dataclass(frozen=True, eq=False)
class Leaf:
    """Operators in issue order on local devices.

    Attributes
    ----------
    device, duration_ps : array, shape (num_operators,)
    predecessor_start, predecessor : compressed rows
        ``-1 - i`` is input port i.
    outputs : array
        Operator (or ``-1 - i``) of each output port.
    collective : bool array, shape (num_operators,)
        Operators that, in a replicated call, also wait for the predecessors of their peers.
    """

    num_devices: int
    num_inputs: int
    device: IntArray
    duration_ps: IntArray
    predecessor_start: IntArray
    predecessor: IntArray
    outputs: IntArray
    collective: IntArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    powers: dict[int, IntArray] = field(default_factory=dict, repr=False)
    """Cached matrices of repeated runs, by their number."""

    @property
    def num_outputs(self) -> int:
        """Number of output ports."""
        return len(self.outputs)

    @property
    def num_operators(self) -> int:
        """Number of operators."""
        return len(self.device)

    @functools.cached_property
    def total_ps(self) -> int:
        """Sum of all durations, an upper bound of the matrix entries."""
        return int(summable("operators of a subgraph", self.duration_ps, "ps").sum())

    @functools.cached_property
    def matrix(self) -> IntArray:
        """Max-plus matrix, shape (devices + outputs, devices + inputs)."""
        columns = self.num_devices + self.num_inputs
        out = np.empty((self.num_devices + self.num_outputs, columns), np.int64)
        ends = np.empty((self.num_operators, columns), np.int64)
        kernels.transfer(
            self.device, self.predecessor_start, self.predecessor, self.duration_ps, self.outputs, out, ends
        )
        return out


@dataclass(frozen=True)
class Call:
    """One use of a subgraph.

    ``devices[i]`` is the caller's device for the subgraph's device i. ``inputs[j]`` are the ports that input j waits
    for; if empty, it is ready from the start. ``repeat`` runs the subgraph several times in a row, with outputs as
    inputs of the next run. ``replicas`` is the number of symmetric peers, which are simulated once.
    """

    graph: Subgraph
    devices: tuple[int, ...]
    inputs: tuple[tuple[Port, ...], ...]
    repeat: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        """Check ports and devices."""
        if len(self.devices) != self.graph.num_devices or len(set(self.devices)) != len(self.devices):
            raise InputError("call.devices", f"{self.devices} are not {self.graph.num_devices} different devices")
        if len(self.inputs) != self.graph.num_inputs:
            raise InputError("call.inputs", f"has {len(self.inputs)} ports, the subgraph {self.graph.num_inputs}")
        if len(self.devices) + len(self.inputs) > kernels.MAX_COLUMNS:
            raise InputError("call", f"has more than {kernels.MAX_COLUMNS} devices and inputs", "split the subgraph")
        if self.repeat < 1 or self.replicas < 1:
            raise InputError("call", f"repeat {self.repeat} or replicas {self.replicas} is below 1")
        if self.repeat > 1 and self.graph.num_inputs != self.graph.num_outputs:
            raise InputError("call.repeat", "needs as many outputs as inputs")

    @property
    def matrix(self) -> IntArray:
        """Max-plus matrix of the call, with repeats."""
        return repeated(self.graph, self.repeat)


@dataclass(frozen=True, eq=False)
class Composite:
    """Calls in issue order, with inputs and outputs as ports."""

    num_devices: int
    num_inputs: int
    calls: tuple[Call, ...]
    outputs: tuple[Port, ...]

    def __post_init__(self) -> None:
        """Check that every port exists before its use."""
        for i, call in enumerate(self.calls):
            if any(not 0 <= d < self.num_devices for d in call.devices):
                raise InputError(f"calls[{i}].devices", f"{call.devices} are not all below {self.num_devices}")
            for port in (p for ports in call.inputs for p in ports):
                self._check(port, i, f"calls[{i}].inputs")
        for port in self.outputs:
            self._check(port, len(self.calls), "outputs")

    def _check(self, port: Port, before: int, where: str) -> None:
        if port.call == INPUT:
            bound = self.num_inputs
        elif 0 <= port.call < before:
            bound = self.calls[port.call].graph.num_outputs
        else:
            raise InputError(where, f"call {port.call} is not an earlier one", "edges follow the issue order")
        if not 0 <= port.port < bound:
            raise InputError(where, f"port {port.port} of call {port.call} is not below {bound}")

    @property
    def num_outputs(self) -> int:
        """Number of output ports."""
        return len(self.outputs)

    @property
    def num_operators(self) -> int:
        """Number of operators, including nested calls and repeats."""
        return sum(call.graph.num_operators * call.repeat for call in self.calls)

    @functools.cached_property
    def total_ps(self) -> int:
        """Sum of all durations, including repeats."""
        total = sum(call.graph.total_ps * call.repeat for call in self.calls)
        check_total("calls of a subgraph", total, "ps")
        return total

    @functools.cached_property
    def matrix(self) -> IntArray:
        """Max-plus matrix, computed from those of the calls."""
        check_total("calls of a subgraph", self.total_ps, "ps")
        columns = self.num_devices + self.num_inputs
        identity = np.full((columns, columns), kernels.NEVER, np.int64)
        np.fill_diagonal(identity, 0)
        free = identity[: self.num_devices].copy()
        outputs: list[IntArray] = []

        def row(port: Port) -> IntArray:
            source = identity[self.num_devices :] if port.call == INPUT else outputs[port.call]
            found: IntArray = source[port.port]
            return found

        for call in self.calls:
            entry = [free[list(call.devices)]]
            for ports in call.inputs:
                rows = [row(port) for port in ports]
                entry.append(np.max(rows, axis=0)[None] if rows else np.full((1, columns), kernels.NEVER, np.int64))
            exit_: IntArray = kernels.compose(call.matrix, np.concatenate(entry))
            free[list(call.devices)] = exit_[: len(call.devices)]
            outputs.append(exit_[len(call.devices) :])
        out = [row(port)[None] for port in self.outputs]
        result: IntArray = np.concatenate([free, *out])
        return result


Subgraph = Leaf | Composite


def repeated(graph: Subgraph, times: int) -> IntArray:
    """Return the matrix of ``times`` runs in a row, by repeated squaring, cached for leaves."""
    check_total("a repeated subgraph", graph.total_ps * times, "ps")
    if times == 1:
        return graph.matrix
    if isinstance(graph, Leaf):
        if times not in graph.powers:
            graph.powers[times] = _power(graph, times)
        return graph.powers[times]
    return _power(graph, times)


def _power(graph: Subgraph, times: int) -> IntArray:
    power, out = graph.matrix, None
    while times:
        if times & 1:
            out = power if out is None else kernels.compose(power, out)
        times >>= 1
        if times:
            power = kernels.compose(power, power)
    assert out is not None
    result: IntArray = out
    return result
