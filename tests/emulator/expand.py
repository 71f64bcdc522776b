"""Write a pass of a stage out operator by operator, as the reference for reuse."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.emulator.kernels import issue
from pipeloom.emulator.stage import Stage
from pipeloom.emulator.subgraph import NUM_PORTS, Leaf
from pipeloom.emulator.tape import NUM_DEVICES


class Call(NamedTuple):
    """``repeat`` runs of a leaf in a row, on ``replicas`` peers. Peers wait for one another at collectives."""

    leaf: Leaf
    repeat: int = 1
    replicas: int = 1
    collective: tuple[bool, ...] = ()


class Flat:
    """A chain of calls without reuse: every run is written out, and every peer has its own devices."""

    def __init__(self, calls: list[Call]) -> None:
        self.device: list[int] = []
        self.duration: list[int] = []
        self.before: list[tuple[int, ...]] = []
        self.num_devices = NUM_DEVICES * max((call.replicas for call in calls), default=1)
        self.outputs = [-1 - i for i in range(NUM_PORTS)]
        for call in calls:
            ports = [list(self.outputs) for _ in range(call.replicas)]
            for _ in range(call.repeat):
                ports = self._add(call, ports)
            self.outputs = ports[0]

    def _add(self, call: Call, inputs: list[list[int]]) -> list[list[int]]:
        """Add one run for all peers in lockstep: operator by operator, peer by peer. Return the outputs of each."""
        leaf, number = call.leaf, [list[int]() for _ in inputs]
        for i in range(len(leaf.device)):
            rows = leaf.predecessor[leaf.predecessor_start[i] : leaf.predecessor_start[i + 1]].tolist()
            before = [[inputs[peer][-1 - p] if p < 0 else number[peer][p] for p in rows] for peer in range(len(inputs))]
            if call.collective and call.collective[i]:
                before = [sorted({q for each in before for q in each})] * len(inputs)
            for peer, own in enumerate(before):
                number[peer].append(len(self.device))
                self.device.append(NUM_DEVICES * peer + int(leaf.device[i]))
                self.duration.append(int(leaf.duration_ps[i]))
                self.before.append(tuple(own))
        return [
            [inputs[peer][-1 - o] if o < 0 else number[peer][o] for o in leaf.outputs.tolist()]
            for peer in range(len(inputs))
        ]

    def run(self, free: list[int], ready: list[int]) -> list[int]:
        """Time all operators. Return when the first peer's devices are free and its outputs are ready."""
        start = np.cumsum([0, *map(len, self.before)])
        predecessor = np.array([p for each in self.before for p in each], np.int64)
        state = np.zeros(self.num_devices, np.int64)
        state[:NUM_DEVICES] = free
        arrays = (np.array(self.device, np.int64), start, predecessor, np.array(self.duration, np.int64))
        end = issue(*arrays, state, np.array(ready))
        return [*state[:NUM_DEVICES].tolist(), *(ready[-1 - o] if o < 0 else int(end[o]) for o in self.outputs)]


def expand(stage: Stage, workload, part) -> Flat:
    """Write out one pass of a stage."""
    calls = []
    for i in stage._ordered.get(part, ()):
        layer, strategy, count = stage.runs[i].layer, stage.runs[i].strategy, stage.runs[i].count
        costs = layer.passes[strategy].programs[part].costs
        collective = tuple(cost.steps > 0 and cost.kind not in ("offload", "load") for cost in costs)
        leaf = layer.on(workload).leaves[strategy, part]
        calls.append(Call(leaf, count, layer.context.tensor, collective))
    return Flat(calls)
