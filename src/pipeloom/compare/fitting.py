"""Search for degrees of parallelism, and a number of devices, with which a model fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import log2

import msgspec

from pipeloom.compare.answer import Question
from pipeloom.compare.comparison import compare_setting
from pipeloom.compare.model_on_cluster import ModelOnCluster, num_experts, put_on_cluster
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.emulator.static import WEIGHT_BYTES
from pipeloom.errors import InputError
from pipeloom.search import Budget
from pipeloom.spec import Chunk
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.parallelism import Degrees

_SIMPLEST = "1f1b"
"""The system that must fit: the simplest one with recomputation."""
_MOST_DEVICES = 1 << 17
_MOST_TRIALS = 4
"""Degrees tried for each number of devices, the closest first."""


def fitting_degrees(question: Question) -> Degrees | None:
    """Find the fewest devices on which a model fits, with the degrees closest to the current ones.

    Tried are the cluster's number of devices and its doublings, and degrees that are powers of two. The product of the
    degrees is the number of devices. None: no degrees were found.
    """
    cluster, iterations = question.setting.cluster, question.iterations
    least = _least_bytes(question.setting) / question.setting.capacity_bytes
    nodes = cluster.num_nodes
    while nodes * cluster.devices_per_node < least:
        nodes *= 2
    while nodes * cluster.devices_per_node <= _MOST_DEVICES:
        larger = msgspec.structs.replace(cluster, num_nodes=nodes)
        for degrees in itertools.islice(_candidates(question.setting, larger), _MOST_TRIALS):
            try:
                setting = put_on_cluster(
                    question.setting.architecture, larger, degrees, trainer=question.setting.trainer
                )
                (one,) = compare_setting(setting, iterations, [_SIMPLEST], budget=Budget(evaluations=1))
            except InputError:
                continue
            if one.result is not None:
                return degrees
        nodes *= 2
    return None


def _least_bytes(setting: ModelOnCluster) -> int:
    """Return a lower bound on the bytes of weights, gradients and optimizer states of all devices."""
    trained = WEIGHT_BYTES + sum(setting.degrees.state)
    return sum(
        layer.num_parameters * (WEIGHT_BYTES if module.frozen else trained)
        for module in setting.model.modules
        for layer in module.flat_layers
    )


def _candidates(setting: ModelOnCluster, cluster: ClusterSpec) -> Iterator[Degrees]:
    """Yield degrees that use all devices and fit weights and optimizer states, the closest first."""
    current, experts = setting.degrees, num_experts(setting.architecture)
    powers = [1 << k for k in range(cluster.num_devices.bit_length())]
    found = []
    for tensor, pipeline, expert in itertools.product(powers, powers, powers):
        data, left = divmod(cluster.num_devices, tensor * pipeline * current.context)
        if left or not data or tensor > cluster.devices_per_node or experts % expert:
            continue
        try:
            degrees = msgspec.structs.replace(
                current,
                tensor=tensor,
                pipeline=pipeline,
                data=data,
                expert=expert,
                expert_tensor=current.expert_tensor if expert > 1 else 1,
            )
        except InputError:
            continue
        pairs = ((tensor, current.tensor), (pipeline, current.pipeline), (expert, current.expert))
        steps = sum(abs(log2(new / old)) for new, old in pairs)
        found.append((steps, pipeline, tensor, expert, degrees))
    for *_, degrees in sorted(found, key=lambda one: one[:-1]):
        if _static_fits(setting, cluster, degrees):
            yield degrees


def _static_fits(setting: ModelOnCluster, cluster: ClusterSpec, degrees: Degrees) -> bool:
    """Return whether weights and optimizer states fit if divided evenly over the pipeline."""
    try:
        costs = EmulatedCosts(setting.architecture, cluster, degrees, split=False, trainer=setting.trainer)
        wholes = [Chunk(module.name, (0, len(module.flat_layers) - 1), 0) for module in setting.model.modules]
        total = costs.static_bytes_together(wholes)
    except InputError:
        return False
    return total / degrees.pipeline <= setting.capacity_bytes
