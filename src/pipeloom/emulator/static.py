"""Static memory: weights, gradients and optimizer state on one device, and the cost of updates.

Mixed-precision Adam as in Megatron: 2 bytes of weight, 4 of accumulated gradient and 12 of optimizer state (master
weight, two moments) per parameter, 18 in all. ZeRO-1 divides the optimizer state over data parallelism, ZeRO-3
everything (Rajbhandari et al. 2020). Layers with quantized products keep quantized copies of their weights too, which
are made once in an iteration.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeloom.emulator.build import Placement
from pipeloom.emulator.collectives import ring
from pipeloom.emulator.rules import RuleTable
from pipeloom.emulator.size import ONE
from pipeloom.emulator.tape import COMPUTE, Cost
from pipeloom.emulator.template import LayerTemplate
from pipeloom.spec.parallelism import Degrees
from pipeloom.totals import PS_PER_S

WEIGHT_BYTES = 2
"""Bytes of a weight that no layer has quantized."""
HOST_UPDATE_BYTES = 30
"""Bytes of host memory that Adam moves for each parameter: reads weight, gradient and two moments in float32, writes
weight and moments, and the new weight in bfloat16."""


def static_bytes(layers: Sequence[LayerTemplate], degrees: Degrees, *, host_optimizer: bool = False) -> int:
    """Return the bytes of weights, gradients and optimizer state of layers on one device.

    If the optimizer runs on the host, gradients and state are there. With ZeRO-3, two layers at a time are whole: the
    one that runs and the one that is gathered ahead. Only these have quantized copies. The gradients of the one that
    runs are whole too, as the backward makes them and as they are reduced.
    """
    total, largest, gathered = 0.0, 0.0, 0.0
    for layer in layers:
        whole = graded = 0.0
        per_kind = zip(layer.local_parameters, layer.weight_bytes, layer.copied_bytes, degrees.shards, strict=True)
        for count, weight, copied, peers in per_kind:
            gradient, optimizer = degrees.state if layer.trainable and not host_optimizer else (0, 0)
            if degrees.zero == 3 and peers > 1:
                total += (weight + count * (gradient + optimizer)) / peers
                whole += weight + copied
                graded += count * (WEIGHT_BYTES + degrees.state.gradient) if layer.trainable else 0.0
            else:
                total += weight + copied + count * (gradient + optimizer / (peers if degrees.zero else 1))
        gathered, largest = max(gathered, whole), max(largest, whole + graded)
    return round(total + gathered + largest)


def update_costs(layers: Sequence[LayerTemplate], placement: Placement) -> list[Cost]:
    """Return the operators at the end of an iteration: reduce gradients, run the optimizer, gather new weights."""
    costs: list[Cost] = []
    degrees, trainer = placement.degrees, placement.trainer
    state, groups, trained = degrees.state, placement.data_groups, [t for t in layers if t.trainable]
    for kind_of_weight, (peers, group) in enumerate(zip(degrees.shards, groups, strict=True)):
        count = sum(t.local_parameters[kind_of_weight] for t in trained)
        if not count:
            continue
        divided = peers if degrees.zero else 1
        weight_bytes = sum(t.weight_bytes[kind_of_weight] for t in trained)
        gradients, weights = ONE * (count * state.gradient), ONE * weight_bytes
        if peers > 1 and degrees.zero != 3:
            passes = 2 if degrees.zero == 0 else 1
            kind = "all_reduce" if passes == 2 else "reduce_scatter"
            shown = gradients * (1 - trainer.hidden_reduction)
            costs.append(ring(kind, shown, peers, group, passes=passes))
        # The optimizer reads gradient and state, and writes state and weight.
        moved = (count * (state.gradient + 2 * state.optimizer) + weight_bytes) / divided
        costs.append(Cost("optimizer", ONE * (count / divided * 12), ONE * moved, device=COMPUTE))
        if peers > 1 and degrees.zero == 1:
            costs.append(ring("all_gather", weights * (1 - trainer.hidden_gather), peers, group))
        cast = sum(t.cast_bytes[kind_of_weight] for t in trained)
        if cast:
            costs.append(Cost("cast", ONE * 0, ONE * cast))
    return costs


def update_ps(layers: Sequence[LayerTemplate], placement: Placement) -> int:
    """Return the picoseconds at the end of an iteration on a rank with some layers."""
    costs, on_host = update_costs(layers, placement), 0
    if placement.trainer.host_optimizer:
        costs, on_host = [c for c in costs if c.kind != "optimizer"], _host_update_ps(layers, placement)
    if not costs:
        return on_host
    table = RuleTable(
        placement.devices,
        tuple(c.rule for c in costs),
        np.array([c.device for c in costs]),
        np.array([c.steps for c in costs]),
    )
    amounts = np.array([[c.flops.one, c.memory.one, c.network.one] for c in costs])
    return on_host + int(table.durations_ps(amounts).sum())


def _host_update_ps(layers: Sequence[LayerTemplate], placement: Placement) -> int:
    """Return the picoseconds of an update on the host: copy gradients there, run the optimizer, copy weights back.

    All devices of a node share the bandwidth of its memory. Reading it again to clip gradients, and the host's
    operations, are not counted.
    """
    cluster, degrees = placement.cluster, placement.degrees
    counts = map(sum, zip(*(layer.local_parameters for layer in layers if layer.trainable), strict=True))
    mine = sum(count / (peers if degrees.zero else 1) for count, peers in zip(counts, degrees.shards, strict=False))
    copies = 2 * WEIGHT_BYTES / cluster.copy_bytes_per_s if cluster.copy_bytes_per_s else 0.0
    share = cluster.host_bytes_per_s / cluster.devices_per_node
    return round(mine * (copies + (HOST_UPDATE_BYTES / share if share else 0.0)) * PS_PER_S)
