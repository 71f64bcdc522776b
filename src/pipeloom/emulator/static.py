"""Static memory: weights, gradients and optimizer state on one device, and the cost of updates.

Mixed-precision Adam as in Megatron: 2 bytes of weight, 4 of accumulated gradient and 12 of optimizer state (master
weight, two moments) per parameter, 18 in all. ZeRO-1 divides the optimizer state over data parallelism, ZeRO-3
everything (Rajbhandari et al. 2020).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeloom.emulator.build import Placement
from pipeloom.emulator.operators import ring
from pipeloom.emulator.rules import RuleTable
from pipeloom.emulator.size import ONE
from pipeloom.emulator.tape import COMPUTE, Cost
from pipeloom.emulator.template import LayerTemplate
from pipeloom.spec.parallelism import Degrees

WEIGHT_BYTES = 2


def shards(degrees: Degrees) -> tuple[int, int]:
    """Return the number of devices over which the state of dense weights and of experts is divided."""
    dense = degrees.data * degrees.context
    return dense, max(1, degrees.expert_data) if degrees.expert > 1 else dense


def static_bytes(layers: Sequence[LayerTemplate], degrees: Degrees) -> int:
    """Return the bytes of weights, gradients and optimizer state of layers on one device.

    With ZeRO-3, two layers at a time are whole: the one that runs and the one that is gathered ahead.
    """
    total, largest = 0.0, 0
    for layer in layers:
        largest = max(largest, sum(layer.local_parameters) * WEIGHT_BYTES)
        for count, peers in zip(layer.local_parameters, shards(degrees), strict=True):
            state = degrees.state if layer.trainable else (0, 0)
            whole = WEIGHT_BYTES + state[0]
            if degrees.zero == 3:
                total += count * (whole + state[1]) / peers
            else:
                total += count * (whole + state[1] / (peers if degrees.zero == 1 else 1))
    return round(total) + (2 * largest if degrees.zero == 3 else 0)


def update_costs(layers: Sequence[LayerTemplate], placement: Placement) -> list[Cost]:
    """Return the operators at the end of an iteration: reduce gradients, run the optimizer, gather new weights."""
    costs: list[Cost] = []
    degrees, trainer = placement.degrees, placement.trainer
    state, groups = degrees.state, placement.data_groups
    counts = map(sum, zip(*(t.local_parameters for t in layers if t.trainable), strict=True))
    for count, peers, group in zip(counts, shards(degrees), groups, strict=False):
        if not count:
            continue
        divided = peers if degrees.zero else 1
        gradients, weights = ONE * (count * state.gradient), ONE * (count * WEIGHT_BYTES)
        if peers > 1 and degrees.zero != 3:
            passes = 2 if degrees.zero == 0 else 1
            kind = "all_reduce" if passes == 2 else "reduce_scatter"
            shown = gradients * (1 - trainer.hidden_reduction)
            costs.append(ring(kind, shown, peers, group, passes=passes))
        # The optimizer reads gradient and state, and writes state and weight.
        moved = count / divided * (state.gradient + 2 * state.optimizer + WEIGHT_BYTES)
        costs.append(Cost("optimiser", ONE * (count / divided * 12), ONE * moved, device=COMPUTE))
        if peers > 1 and degrees.zero == 1:
            costs.append(ring("all_gather", weights * (1 - trainer.hidden_gather), peers, group))
    return costs


def update_ps(layers: Sequence[LayerTemplate], placement: Placement) -> int:
    """Return the picoseconds at the end of an iteration on a rank with some layers."""
    costs = update_costs(layers, placement)
    if not costs:
        return 0
    table = RuleTable(
        placement.devices,
        tuple(c.rule for c in costs),
        np.array([c.device for c in costs]),
        np.array([c.steps for c in costs]),
    )
    amounts = np.array([[c.flops.one, c.memory.one, c.network.one] for c in costs])
    return int(table.durations_ps(amounts).sum())
