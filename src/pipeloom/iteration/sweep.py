"""Sweep the grid of parallelism degrees (DIP Fig. 13)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.iteration.emulation import (
    DEFAULT_STRATEGIES,
    EmulatedStep,
    even_pipeline,
    fastest_step,
    image_sizes,
    instance_tokens,
)
from pipeloom.iteration.microbatches import Draw, Microbatches
from pipeloom.spec import ChunkStrategy
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.catalog import load_architecture, load_cluster
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.parallelism import Degrees
from pipeloom.spec.trainer import FUSED, TrainerSpec

_RETRY_FACTOR = 1.2
"""Points within this factor of the best are also tried with larger sub-microbatches."""


@dataclass(frozen=True)
class Points:
    """Points of a sweep: degrees that use all devices, each with the fastest of several strategies that fits."""

    num_devices: int | None = None
    """Number of devices; None: all of the cluster."""
    max_tensor: int = 8
    strategies: Sequence[ChunkStrategy | str] = DEFAULT_STRATEGIES


@dataclass(frozen=True)
class SweepEntry:
    """One point of a sweep: the degrees, and their result or the reason why there is none."""

    degrees: Degrees
    result: EmulatedStep | None
    problem: str = ""

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration of the whole global batch; infinite if it cannot run."""
        return self.result.iteration_s if self.result is not None else float("inf")


def grid(num_devices: int, max_tensor: int, **fixed: int) -> list[Degrees]:
    """Return all degrees (tensor, pipeline, data) that are powers of two and use all devices."""
    powers = [1 << k for k in range(num_devices.bit_length()) if 1 << k <= num_devices]
    return [
        Degrees(tensor=t, pipeline=p, data=num_devices // (t * p), **fixed)  # type: ignore[arg-type]
        for t, p in itertools.product(powers, powers)
        if t <= max_tensor and num_devices % (t * p) == 0
    ]


def sweep(
    model: str | Architecture,
    cluster: str | ClusterSpec,
    *,
    batch: Draw | Microbatches = Draw(128),
    points: Points = Points(),
    sub_microbatch: Mapping[str, int] | None = None,
    progress: Callable[[SweepEntry], None] | None = None,
    trainer: TrainerSpec = FUSED,
) -> list[SweepEntry]:
    """Emulate every combination of degrees on the same global batch. Return the results, fastest first.

    The global batch is divided among the data-parallel replicas. The replica with the most work is emulated, because
    all wait for it to reduce gradients. Without ``sub_microbatch``, DIP's rule groups images (`image_sizes`). Points
    near the best also try twice as many, because the rule considers layers, not pipelines.

    Parameters
    ----------
    model, cluster : zoo name, path of a TOML file, or the spec itself
    batch : samples per microbatch of the global batch, or how to draw them
    points : degrees and strategies that are tried
    sub_microbatch : instances per sub-microbatch by module; default: images by DIP's rule (`image_sizes`)
    progress : called with each result
    trainer : framework that runs the model

    Raises
    ------
    InputError
        If the cluster does not have as many devices, or ``sub_microbatch`` names an unknown module.
    """
    architecture = load_architecture(model) if isinstance(model, str) else model
    hardware = load_cluster(cluster) if isinstance(cluster, str) else cluster
    for name in sub_microbatch or ():
        architecture.module(name)
    devices = hardware.num_devices if points.num_devices is None else points.num_devices
    if not 1 <= devices <= hardware.num_devices:
        raise InputError("num_devices", f"{devices} is not within 1..{hardware.num_devices}")
    drawn = batch.of(architecture) if isinstance(batch, Draw) else batch

    @cache
    def sizes(tensor: int) -> Mapping[str, int]:
        # Efficient sizes depend only on tensor parallelism.
        costs = EmulatedCosts(architecture, hardware, Degrees(tensor=tensor), ("keep",), split=False, trainer=trainer)
        return image_sizes(costs, drawn)

    def entry(degrees: Degrees, times: int, strategies: Sequence[ChunkStrategy | str]) -> SweepEntry:
        try:
            parts = sub_microbatch
            if parts is None:
                parts = {name: times * size for name, size in sizes(degrees.tensor).items()}
            if degrees.data > len(drawn):
                return SweepEntry(degrees, None, f"{len(drawn)} microbatches for {degrees.data} replicas")
            costs = EmulatedCosts(architecture, hardware, degrees, strategies, split=False, trainer=trainer)
            layout = even_pipeline(costs, drawn, parts, {})
            replicas = [drawn[r :: degrees.data] for r in range(degrees.data)]
            tokens = instance_tokens(costs)
            largest = max(replicas, key=lambda replica: sum(map(tokens, replica)))
            return SweepEntry(degrees, fastest_step(costs, layout, largest))
        except (InputError, InfeasibleError) as error:
            return SweepEntry(degrees, None, str(error))

    entries = []
    for degrees in grid(devices, min(points.max_tensor, hardware.devices_per_node)):
        entries.append(entry(degrees, 1, points.strategies))
        if progress is not None:
            progress(entries[-1])
    if sub_microbatch is None and any(module.reads == "images" for module in architecture.modules):
        threshold = _RETRY_FACTOR * min(each.iteration_s for each in entries)
        for i, each in enumerate(entries):
            if each.result is not None and each.iteration_s <= threshold:
                larger = entry(each.degrees, 2, (each.result.strategy,))
                entries[i] = min(each, larger, key=lambda e: e.iteration_s)
    return sorted(entries, key=lambda e: e.iteration_s)
