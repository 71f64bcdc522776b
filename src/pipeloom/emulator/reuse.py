"""Reuse of subgraphs: nested, repeated, replicated, cached, exact (`pipeweaver.txt` §4.2).

A `Leaf` is a run of operators with known durations on its own (local) devices; a `Composite` is a run of
calls of other subgraphs. Either is, by the timing rule of the kernels, one max-plus matrix from the times at
which devices and inputs are ready to the times at which devices are free and outputs ready. A `Session` runs
calls on real devices; it can be checkpointed, and resumed with new edges, in which case all calls before the
first one touched keep their results.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pipeloom.emulator.kernels import MAX_COLUMNS, NEVER, compose, run_calls, transfer
from pipeloom.emulator.rules import IntArray
from pipeloom.errors import InputError

INPUT = -1


class Port(NamedTuple):
    """Output ``port`` of call ``call``; call `INPUT` means input port ``port`` of the enclosing subgraph."""

    call: int
    port: int = 0


@dataclass(frozen=True, eq=False)
class Leaf:
    """Operators in issue order on local devices.

    Attributes
    ----------
    num_devices, num_inputs : int
    device, duration_ps : array, shape (num_operators,)
    predecessor_start, predecessor : compressed rows
        ``-1 - i`` is input port i.
    outputs : array
        Operator (or ``-1 - i``) behind each output port.
    collective : bool array, shape (num_operators,)
        Operators that, in a replicated call, wait for what their peers wait for.
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
    """Matrices of so many runs in a row, as far as they were asked for."""

    @property
    def num_outputs(self) -> int:
        """Number of output ports."""
        return len(self.outputs)

    @property
    def num_operators(self) -> int:
        """Number of operators."""
        return len(self.device)

    @functools.cached_property
    def matrix(self) -> IntArray:
        """Max-plus matrix, shape (devices + outputs, devices + inputs)."""
        out: IntArray = transfer(
            self.device, self.predecessor_start, self.predecessor, self.duration_ps, self.outputs,
            self.num_devices, self.num_inputs,
        )[0]  # fmt: skip
        return out


@dataclass(frozen=True)
class Call:
    """One use of a subgraph.

    ``devices[i]`` is the caller's device behind the subgraph's device i; ``inputs[j]`` are the ports that
    input j waits for (none: ready from the start). ``repeat`` runs the subgraph so often in a row, its
    outputs feeding its inputs. ``replicas`` says that so many symmetric peers do the same: they are
    simulated once.
    """

    graph: Subgraph
    devices: tuple[int, ...]
    inputs: tuple[tuple[Port, ...], ...]
    repeat: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        """Check that ports and devices fit."""
        if len(self.devices) != self.graph.num_devices or len(set(self.devices)) != len(self.devices):
            raise InputError(
                "call.devices", f"{self.devices} are not {self.graph.num_devices} different devices"
            )
        if len(self.inputs) != self.graph.num_inputs:
            raise InputError(
                "call.inputs", f"has {len(self.inputs)} ports, the subgraph {self.graph.num_inputs}"
            )
        if len(self.devices) + len(self.inputs) > MAX_COLUMNS:
            raise InputError("call", f"has more than {MAX_COLUMNS} devices and inputs", "split the subgraph")
        if self.repeat < 1 or self.replicas < 1:
            raise InputError("call", f"repeat {self.repeat} or replicas {self.replicas} is below 1")
        if self.repeat > 1 and self.graph.num_inputs != self.graph.num_outputs:
            raise InputError("call.repeat", "needs as many outputs as inputs")

    @property
    def matrix(self) -> IntArray:
        """Max-plus matrix of the call, repeats included."""
        return repeated(self.graph, self.repeat)


@dataclass(frozen=True, eq=False)
class Composite:
    """Calls in issue order, inputs and outputs named by ports."""

    num_devices: int
    num_inputs: int
    calls: tuple[Call, ...]
    outputs: tuple[Port, ...]

    def __post_init__(self) -> None:
        """Check that every port exists when it is used."""
        for i, call in enumerate(self.calls):
            if any(not 0 <= d < self.num_devices for d in call.devices):
                raise InputError(
                    f"calls[{i}].devices", f"{call.devices} are not all below {self.num_devices}"
                )
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
        """Number of operators, those of nested calls and repeats included."""
        return sum(call.graph.num_operators * call.repeat for call in self.calls)

    @functools.cached_property
    def matrix(self) -> IntArray:
        """Max-plus matrix, made from those of the calls."""
        columns = self.num_devices + self.num_inputs
        identity = np.full((columns, columns), NEVER, np.int64)
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
                entry.append(np.max(rows, axis=0)[None] if rows else np.full((1, columns), NEVER, np.int64))
            exit_: IntArray = compose(call.matrix, np.concatenate(entry))
            free[list(call.devices)] = exit_[: len(call.devices)]
            outputs.append(exit_[len(call.devices) :])
        out = [row(port)[None] for port in self.outputs]
        result: IntArray = np.concatenate([free, *out])
        return result


Subgraph = Leaf | Composite


def repeated(graph: Subgraph, times: int) -> IntArray:
    """Matrix of a subgraph run ``times`` in a row, by squaring; a leaf remembers it."""
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
            out = power if out is None else compose(power, out)
        times >>= 1
        if times:
            power = compose(power, power)
    assert out is not None
    result: IntArray = out
    return result


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A session's calls and results at one moment; `Session.restore` continues from it."""

    num_devices: int
    calls: tuple[Call, ...]
    free: IntArray
    ready: IntArray


class Session:
    """Runs calls on real devices, and remembers enough to resume.

    Parameters
    ----------
    num_devices : int

    Attributes
    ----------
    num_reused : int
        Calls whose results the last `run` took over instead of computing.
    """

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.calls: list[Call] = []
        self.num_reused = 0
        self._free = np.zeros((1, num_devices), np.int64)
        self._ready = np.zeros(0, np.int64)
        self._clean = 0
        self._pool: _Pool | None = None

    def call(
        self,
        graph: Subgraph,
        devices: Sequence[int],
        inputs: Sequence[Sequence[Port]] | None = None,
        *,
        repeat: int = 1,
        replicas: int = 1,
    ) -> int:
        """Issue a subgraph and return the number of the call."""
        ports = tuple(tuple(p) for p in inputs) if inputs is not None else ((),) * graph.num_inputs
        call = Call(graph, tuple(devices), ports, repeat, replicas)
        self._check(len(self.calls), call)
        self.calls.append(call)
        self._pool = None
        return len(self.calls) - 1

    def _check(self, number: int, call: Call) -> None:
        if min(call.devices) < 0 or max(call.devices) >= self.num_devices:
            raise InputError(
                f"calls[{number}].devices", f"{call.devices} are not all below {self.num_devices}"
            )
        for ports in call.inputs:
            for port in ports:
                source = port.call
                if not (0 <= source < number and 0 <= port.port < self.calls[source].graph.num_outputs):
                    raise InputError(f"calls[{number}].inputs", f"{port} is not an output of an earlier call")

    def connect(self, source: Port, call: int, port: int = 0) -> None:
        """Add an edge: input ``port`` of ``call`` waits for ``source`` too."""
        old = self.calls[call]
        if not 0 <= port < len(old.inputs):
            raise InputError(f"calls[{call}]", f"has no input port {port}")
        inputs = list(old.inputs)
        inputs[port] = (*inputs[port], source)
        self.replace(call, Call(old.graph, old.devices, tuple(inputs), old.repeat, old.replicas))

    def replace(self, number: int, call: Call) -> None:
        """Put another call in one's place; everything before it keeps its results."""
        self._check(number, call)
        if call.graph.num_outputs != self.calls[number].graph.num_outputs:
            raise InputError(f"calls[{number}]", "would change its number of outputs", "make a new session")
        old, self.calls[number] = self.calls[number], call
        if self._pool is not None and (old.devices, old.inputs) == (call.devices, call.inputs):
            self._pool.replace(number, call)
        else:
            self._pool = None
        self._clean = min(self._clean, number)

    def run(self) -> IntArray:
        """Run what is not known yet; return when each device is free, shape (num_devices,)."""
        pool = self._pool = self._pool or _Pool(self.calls)
        total = len(self.calls)
        free = np.zeros((total + 1, self.num_devices), np.int64)
        free[: self._clean + 1] = self._free[: self._clean + 1]
        ready = np.zeros(pool.num_outputs, np.int64)
        known = int(pool.output_start[self._clean])
        ready[:known] = self._ready[:known]
        pool.run(self._clean, free, ready)
        self.num_reused, self._clean = self._clean, total
        self._free, self._ready, self._output_start = free, ready, pool.output_start
        last: IntArray = free[-1]
        return last

    def ready_ps(self, port: Port) -> int:
        """When an output was ready in the last run."""
        return int(self._ready[self._output_start[port.call] + port.port])

    def entries_and_exits_ps(self, calls: IntArray, devices: IntArray) -> tuple[IntArray, IntArray]:
        """When each call could start (its device free and its inputs ready), and when it freed the device."""
        assert self._pool is not None
        ready = self._pool.inputs_ready(self._ready)
        begin = np.maximum(self._free[calls, devices], ready[calls])
        return begin, np.maximum(begin, self._free[calls + 1, devices])

    def checkpoint(self) -> Checkpoint:
        """Freeze calls and results."""
        if self._clean != len(self.calls):
            self.run()
        return Checkpoint(self.num_devices, tuple(self.calls), self._free, self._ready)

    @classmethod
    def restore(cls, saved: Checkpoint) -> Session:
        """Continue from a checkpoint, leaving the checkpoint as it is."""
        session = cls(saved.num_devices)
        session.calls = list(saved.calls)
        session._free, session._ready = saved.free, saved.ready
        session._clean = len(session.calls)
        return session

    def as_subgraph(self, outputs: Sequence[Port] = ()) -> Composite:
        """The session's calls as one subgraph, for nesting or for `expand`."""
        return Composite(self.num_devices, 0, tuple(self.calls), tuple(outputs))


class _Pool:
    """A session's calls as the arrays of `kernels.run_calls`."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._number: dict[tuple[int, int], int] = {}
        self._graphs: list[Subgraph] = []  # held, so that no other graph gets the same id
        self._matrices: list[IntArray] = []
        self._shapes: list[tuple[int, int, int]] = []
        self._call_matrix = np.empty(len(calls), np.int64)
        output_start = np.zeros(len(calls) + 1, np.int64)
        devices: list[int] = []
        device_start: list[int] = []
        input_start: list[int] = []
        waits: list[int] = []
        wait_start = [0]
        for c, call in enumerate(calls):
            self._call_matrix[c] = self._matrix(call)
            output_start[c + 1] = output_start[c] + call.graph.num_outputs
            device_start.append(len(devices))
            devices.extend(call.devices)
            input_start.append(len(wait_start) - 1)
            for ports in call.inputs:
                waits.extend(int(output_start[p.call]) + p.port for p in ports)
                wait_start.append(len(waits))
        self.output_start = output_start
        self._rest = tuple(
            np.array(column, np.int64) for column in (device_start, devices, input_start, wait_start, waits)
        )
        self._pack()

    @property
    def num_outputs(self) -> int:
        """Number of output ports of all calls."""
        return int(self.output_start[-1])

    def _matrix(self, call: Call) -> int:
        key = (id(call.graph), call.repeat)
        if key not in self._number:
            self._number[key] = len(self._matrices)
            self._graphs.append(call.graph)
            self._matrices.append(call.matrix)
            self._shapes.append((call.graph.num_devices, call.graph.num_inputs, call.graph.num_outputs))
        return self._number[key]

    def _pack(self) -> None:
        shape = np.array(self._shapes, np.int64).reshape(-1, 3)
        sizes = [m.size for m in self._matrices]
        self._packed = (
            np.concatenate([m.ravel() for m in self._matrices]) if sizes else np.zeros(0, np.int64),
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            *(np.ascontiguousarray(shape[:, i]) for i in range(3)),
        )

    def inputs_ready(self, ready: IntArray) -> IntArray:
        """When all inputs of each call were ready, shape (num_calls,)."""
        _, _, input_start, wait_start, waits = self._rest
        out = np.zeros(len(self._call_matrix), np.int64)
        port = np.repeat(np.arange(len(wait_start) - 1), np.diff(wait_start))
        np.maximum.at(out, np.searchsorted(input_start, port, side="right") - 1, ready[waits])
        return out

    def replace(self, number: int, call: Call) -> None:
        """Change the subgraph of one call whose devices and inputs stay."""
        known = len(self._matrices)
        self._call_matrix[number] = self._matrix(call)
        if len(self._matrices) > known:
            self._packed = ()

    def run(self, first: int, free: IntArray, ready: IntArray) -> None:
        """Run the calls from ``first`` on."""
        if not self._packed:
            self._pack()
        kernel: Any = run_calls
        kernel(first, *self._packed, self._call_matrix, *self._rest, self.output_start, free, ready)
