"""Sessions: calls of reusable subgraphs on real devices, computed incrementally (PipeWeaver §4.2).

A session can be saved as a checkpoint and resumed with new edges. All calls before the first changed one keep their
results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeloom.emulator.kernels import run_calls
from pipeloom.emulator.rules import IntArray
from pipeloom.emulator.subgraph import Call, Composite, Port, Subgraph
from pipeloom.errors import InputError
from pipeloom.totals import check_total


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Calls and results of a session, from which `Session.restore` continues."""

    num_devices: int
    calls: tuple[Call, ...]
    free: IntArray
    ready: IntArray


class Session:
    """Runs calls on real devices, and caches results to resume.

    Attributes
    ----------
    num_reused : int
        Number of calls whose results the last `run` reused.
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
            raise InputError(f"calls[{number}].devices", f"{call.devices} are not all below {self.num_devices}")
        for ports in call.inputs:
            for port in ports:
                source = port.call
                if not (0 <= source < number and 0 <= port.port < self.calls[source].graph.num_outputs):
                    raise InputError(f"calls[{number}].inputs", f"{port} is not an output of an earlier call")

    def connect(self, source: Port, call: int, port: int = 0) -> None:
        """Add an edge: input ``port`` of ``call`` also waits for ``source``."""
        old = self.calls[call]
        if not 0 <= port < len(old.inputs):
            raise InputError(f"calls[{call}]", f"has no input port {port}")
        inputs = list(old.inputs)
        inputs[port] = (*inputs[port], source)
        self.replace(call, Call(old.graph, old.devices, tuple(inputs), old.repeat, old.replicas))

    def replace(self, number: int, call: Call) -> None:
        """Replace a call. All earlier calls keep their results."""
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
        """Run all calls without results. Return when each device is free, shape (num_devices,)."""
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
        """Return when an output was ready in the last run."""
        return int(self._ready[self._output_start[port.call] + port.port])

    def entries_and_exits_ps(self, calls: IntArray, devices: IntArray) -> tuple[IntArray, IntArray]:
        """Return when each call could start (device free and inputs ready), and when it freed the device."""
        assert self._pool is not None
        ready = self._pool.inputs_ready(self._ready)
        begin = np.maximum(self._free[calls, devices], ready[calls])
        return begin, np.maximum(begin, self._free[calls + 1, devices])

    def checkpoint(self) -> Checkpoint:
        """Return calls and results as a checkpoint."""
        if self._clean != len(self.calls):
            self.run()
        return Checkpoint(self.num_devices, tuple(self.calls), self._free, self._ready)

    @classmethod
    def restore(cls, saved: Checkpoint) -> Session:
        """Return a new session that continues from a checkpoint, which is not changed."""
        session = cls(saved.num_devices)
        session.calls = list(saved.calls)
        session._free, session._ready = saved.free, saved.ready
        session._clean = len(session.calls)
        return session

    def as_subgraph(self, outputs: Sequence[Port] = ()) -> Composite:
        """Return the session's calls as one subgraph, for nesting or for `expand`."""
        return Composite(self.num_devices, 0, tuple(self.calls), tuple(outputs))


class _Pool:
    """Calls of a session as the arrays of `kernels.run_calls`."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._number: dict[tuple[int, int], int] = {}
        self._graphs: list[Subgraph] = []  # keeps them alive, so that ids stay unique
        self._matrices: list[IntArray] = []
        self._shapes: list[tuple[int, int, int]] = []
        check_total("calls", sum(call.graph.total_ps * call.repeat for call in calls), "ps")
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
        """Return when all inputs of each call were ready, shape (num_calls,)."""
        _, _, input_start, wait_start, waits = self._rest
        out = np.zeros(len(self._call_matrix), np.int64)
        port = np.repeat(np.arange(len(wait_start) - 1), np.diff(wait_start))
        np.maximum.at(out, np.searchsorted(input_start, port, side="right") - 1, ready[waits])
        return out

    def replace(self, number: int, call: Call) -> None:
        """Change the subgraph of a call whose devices and inputs stay."""
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
