"""Recomputation for fixed orders: the fastest settings that fit, by module or by rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, pack_microbatches
from pipeloom.compare.result import BaselineResult, fastest, timed
from pipeloom.errors import InfeasibleError
from pipeloom.layout import chain_of_stages
from pipeloom.search import uniform_settings
from pipeloom.spec import Chunk, ChunkStrategy, Layout, Strategy
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule


def per_module_recomputation(name: str, layout: Layout, graph: TaskGraph, schedule: Schedule) -> BaselineResult:
    """Simulate an order with the fastest pair of settings that fits: one for the backbone, one for all encoders.

    Raise `InfeasibleError` if no pair fits.
    """
    settings = uniform_settings(graph)
    backbone = graph.module[graph.forward_of] == len(graph.module_names) - 1
    fitting: list[BaselineResult] = []
    # The less encoders hold, the more the backbone may hold, so one walk along both lists covers all pairs.
    at = len(settings) - 1
    for encoders in settings:
        while at >= 0:
            found = timed(name, layout, graph, schedule, np.where(backbone, settings[at], encoders))
            if not found.fits:
                break
            fitting.append(found)
            at -= 1
    return fastest(name, fitting)


def per_rank_recomputation(
    name: str, layout: Layout, graph: TaskGraph, schedule: Schedule, levels: IntArray
) -> BaselineResult:
    """Simulate an order with one setting per rank; a rank on which the data do not fit recomputes more."""
    settings = uniform_settings(graph)
    step = np.array([settings.index(level) if level in settings else len(settings) - 1 for level in levels.tolist()])
    home = graph.rank[graph.forward_of]
    while True:
        choice = np.array(settings)[step][home]
        found = timed(name, layout, graph, schedule, choice)
        capacity = graph.with_candidates(choice).capacity_bytes
        assert capacity is not None
        full = np.flatnonzero(found.timeline.peak_bytes > capacity)
        if not full.size:
            return found
        if (step[full] == len(settings) - 1).any():
            raise InfeasibleError(f"{name}: rank {full[0]} does not fit even with full recomputation")
        step[full] += 1


def level_tables(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds and bytes of every layer on the mean microbatch, shape (levels, layers).

    If a level applies to a share of the layers, its cost is divided among all layers by this share.
    """
    layout = chain_of_stages(setting.model, 1, 1, lambda _module, _layer: 1.0)
    levels = setting.levels.strategies
    packed = [pack_microbatches(setting, layout, microbatches) for microbatches in batches]
    count = sum(len(p.microbatches) for p in packed)
    seconds: list[list[float]] = []
    held: list[list[float]] = []
    for column, module in enumerate(setting.model.modules):
        parts = [part for p in packed for m in p.microbatches for part in m.parts[column]]
        known: dict[str, tuple[list[float], list[float]]] = {}
        for i, layer in enumerate(module.flat_layers):
            if layer.kind not in known:
                each = [setting.levels.chunk_costs(Chunk(module.name, (i, i), 0), part.workload) for part in parts]
                # One layer has one strategy, so mixtures are computed in proportion below.
                at = {level.first: k for k, level in enumerate(levels) if level.share == 1}
                time = {s: sum(o[k].forward_s + o[k].backward_s for o in each) / count for s, k in at.items()}
                size = {s: sum(o[k].activation_bytes for o in each) / count for s, k in at.items()}
                known[layer.kind] = _spread_levels(time, levels), _spread_levels(size, levels)
            seconds.append(known[layer.kind][0])
            held.append(known[layer.kind][1])
    return np.array(seconds).T, np.array(held).T


def _spread_levels(values: dict[Strategy, float], levels: Sequence[ChunkStrategy]) -> list[float]:
    return [values[level.others] * (1 - level.share) + values[level.first] * level.share for level in levels]
