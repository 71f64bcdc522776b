"""Expand a subgraph operator by operator, as the reference for reuse."""

from __future__ import annotations

import numpy as np

from pipeloom.emulator.subgraph import INPUT, Leaf, Port, Subgraph


def expand(graph: Subgraph) -> Leaf:
    """Return the same operators without reuse: every call is expanded, and every replica is a separate peer.

    Replicas get their own devices after the subgraph's. A collective operator of one replica waits for all inputs of
    the same operator of its peers. Results with reuse must equal those of this graph.
    """
    flat = _Flat(graph.num_devices)
    outputs = flat.add(graph, list(range(graph.num_devices)), [[-1 - i] for i in range(graph.num_inputs)])
    joined = [flat.join(ports) for ports in outputs]
    start = np.zeros(len(flat.device) + 1, np.int64)
    np.cumsum([len(p) for p in flat.before], out=start[1:])
    return Leaf(
        num_devices=flat.num_devices,
        num_inputs=graph.num_inputs,
        device=np.array(flat.device, np.int64),
        duration_ps=np.array(flat.duration, np.int64),
        predecessor_start=start,
        predecessor=np.array([q for p in flat.before for q in p], np.int64),
        outputs=np.array(joined, np.int64),
    )


class _Flat:
    """Operators written out one by one."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.device: list[int] = []
        self.duration: list[int] = []
        self.before: list[list[int]] = []
        self.peers: dict[tuple[int, ...], list[list[int]]] = {}

    def join(self, ports: list[int]) -> int:
        """Add an operator without duration, on a new device, that ends when all ports are ready."""
        if len(ports) == 1:
            return ports[0]
        self.device.append(self.num_devices)
        self.num_devices += 1
        self.duration.append(0)
        self.before.append(list(ports))
        return len(self.device) - 1

    def add(self, graph: Subgraph, devices: list[int], inputs: list[list[int]]) -> list[list[int]]:
        """Expand one subgraph. Ports are lists of operators to wait for."""
        return self._add_peers(graph, [devices], [inputs])[0]

    def _add_peers(
        self, graph: Subgraph, devices: list[list[int]], inputs: list[list[list[int]]]
    ) -> list[list[list[int]]]:
        """Expand a subgraph for several peers in lockstep: operator by operator, peer by peer."""
        if isinstance(graph, Leaf):
            return self._add_leaf(graph, devices, inputs)
        outputs: list[list[list[list[int]]]] = []  # call, peer, port, operators

        def ports(peer: int, port: Port) -> list[int]:
            return inputs[peer][port.port] if port.call == INPUT else outputs[port.call][peer][port.port]

        for number, call in enumerate(graph.calls):
            own = [[d[k] for k in call.devices] for d in devices]
            own_inputs = [
                [[q for port in entry for q in ports(i, port)] for entry in call.inputs] for i in range(len(devices))
            ]
            widths = call.replicas
            key = (id(graph), number, *own[0])
            if widths > 1 and key not in self.peers:
                self.peers[key] = [self._fresh(len(call.devices)) for _ in range(widths - 1)]
            extra = self.peers.get(key, [])
            peers = own + (extra if len(devices) == 1 else [])
            inputs_of = own_inputs + [own_inputs[0] for _ in range(len(peers) - len(own))]
            for _ in range(call.repeat):
                result = self._add_peers(call.graph, peers, inputs_of)
                inputs_of = result
            outputs.append(result[: len(devices)])
        return [[ports(i, port) for port in graph.outputs] for i in range(len(devices))]

    def _fresh(self, count: int) -> list[int]:
        self.num_devices += count
        return list(range(self.num_devices - count, self.num_devices))

    def _add_leaf(self, graph: Leaf, devices: list[list[int]], inputs: list[list[list[int]]]) -> list[list[list[int]]]:
        number: list[list[int]] = [[] for _ in devices]
        for i in range(graph.num_operators):
            rows = graph.predecessor[graph.predecessor_start[i] : graph.predecessor_start[i + 1]].tolist()
            before = [
                [q for p in rows for q in (inputs[peer][-1 - p] if p < 0 else [number[peer][p]])]
                for peer in range(len(devices))
            ]
            if graph.collective.size and graph.collective[i]:
                everyone = sorted({q for b in before for q in b})
                before = [everyone for _ in devices]
            for peer, own in enumerate(devices):
                number[peer].append(len(self.device))
                self.device.append(own[int(graph.device[i])])
                self.duration.append(int(graph.duration_ps[i]))
                self.before.append(before[peer])
        return [
            [inputs[peer][-1 - o] if o < 0 else [number[peer][o]] for o in graph.outputs.tolist()]
            for peer in range(len(devices))
        ]
