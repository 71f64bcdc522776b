"""Recomputation for orders that know none: the fastest setting that fits, for all, by rank or by module."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeloom.arrange import chain
from pipeloom.errors import InfeasibleError
from pipeloom.planner.case import Case, Groups, pack_groups
from pipeloom.planner.compare import SystemTimeline
from pipeloom.search import levels_by_time
from pipeloom.spec import Chunk, Layout
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule, Timeline, lower_bound, simulate


def uniform_recomputation(name: str, layout: Layout, graph: TaskGraph, schedule: Schedule) -> SystemTimeline:
    """Run an order under the fastest setting of recomputation that fits.

    Raises
    ------
    InfeasibleError
        None fits.
    """
    best: tuple[Timeline, IntArray] | None = None
    for level in levels_by_time(graph):
        choice = np.full(graph.num_pairs, level)
        timeline = simulate(graph, Schedule(schedule.order, choice, name))
        if fits(graph, timeline) and (best is None or timeline.makespan_ns < best[0].makespan_ns):
            best = timeline, choice
            break
    if best is None:
        raise InfeasibleError(f"{name}: does not fit even with full recomputation")
    return SystemTimeline(
        name, layout, graph, Schedule(schedule.order, best[1], name), best[0], lower_bound(graph)
    )


def per_module_recomputation(
    name: str, layout: Layout, graph: TaskGraph, schedule: Schedule
) -> SystemTimeline:
    """Run an order with one setting for the backbone and one for all encoders, the fastest pair that fits.

    Raises
    ------
    InfeasibleError
        None fits.
    """
    ladder = levels_by_time(graph)
    backbone = graph.module[graph.forward_of] == len(graph.module_names) - 1
    best: tuple[Timeline, IntArray] | None = None
    # The leaner the encoders, the more the backbone may keep, so one walk down both ladders sees all pairs.
    at = len(ladder) - 1
    for encoders in ladder:
        while at >= 0:
            choice = np.where(backbone, ladder[at], encoders)
            timeline = simulate(graph, Schedule(schedule.order, choice, name))
            if not fits(graph, timeline):
                break
            if best is None or timeline.makespan_ns < best[0].makespan_ns:
                best = timeline, choice
            at -= 1
    if best is None:
        raise InfeasibleError(f"{name}: does not fit even with full recomputation")
    chosen = Schedule(schedule.order, best[1], name)
    return SystemTimeline(name, layout, graph, chosen, best[0], lower_bound(graph))


def fits(graph: TaskGraph, timeline: Timeline) -> bool:
    return graph.capacity_bytes is None or bool((timeline.peak_bytes <= graph.capacity_bytes).all())


def per_rank_recomputation(
    name: str, layout: Layout, graph: TaskGraph, schedule: Schedule, levels: IntArray
) -> SystemTimeline:
    """Run an order with one setting per rank; where the data at hand do not fit, a rank recomputes more."""
    ladder = levels_by_time(graph)
    step = np.array(
        [ladder.index(level) if level in ladder else len(ladder) - 1 for level in levels.tolist()]
    )
    home = graph.rank[graph.forward_of]
    while True:
        choice = np.array(ladder)[step][home]
        chosen = Schedule(schedule.order, choice, name)
        timeline = simulate(graph, chosen)
        assert graph.capacity_bytes is not None
        full = np.flatnonzero(timeline.peak_bytes > graph.capacity_bytes)
        if not full.size:
            return SystemTimeline(name, layout, graph, chosen, timeline, lower_bound(graph))
        if (step[full] == len(ladder) - 1).any():
            raise InfeasibleError(f"{name}: rank {full[0]} does not fit even with full recomputation")
        step[full] += 1


def level_tables(case: Case, batches: Sequence[Groups]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and bytes of every layer on the mean microbatch, shape (levels, layers).

    Parts of a level (``full:0.5``) are in proportion between keeping everything and recomputing everything.
    """
    layout = chain(case.model, 1, 1, lambda _module, _layer: 1.0)
    packed = [pack_groups(case, layout, groups) for groups in batches]
    count = sum(len(p.microbatches) for p in packed)
    seconds: list[list[float]] = []
    held: list[list[float]] = []
    for column, module in enumerate(case.model.modules):
        parts = [part for p in packed for m in p.microbatches for part in m.parts[column]]
        known: dict[str, tuple[list[float], list[float]]] = {}
        for i, layer in enumerate(module.flat_layers):
            if layer.kind not in known:
                each = [
                    case.levels.chunk_costs(Chunk(module.name, (i, i), 0), part.workload) for part in parts
                ]
                names = [option.strategy for option in each[0]]
                at = {s: names.index(s) for s in ("keep", "selective", "full")}
                time = {s: sum(o[k].forward_s + o[k].backward_s for o in each) / count for s, k in at.items()}
                size = {s: sum(o[k].activation_bytes for o in each) / count for s, k in at.items()}
                known[layer.kind] = _spread_levels(time, names), _spread_levels(size, names)
            seconds.append(known[layer.kind][0])
            held.append(known[layer.kind][1])
    return np.array(seconds).T, np.array(held).T


def _spread_levels(values: dict[str, float], names: Sequence[str]) -> list[float]:
    out = []
    for name in names:
        kind, _, share = name.partition(":")
        part = float(share or 1.0)
        out.append(values["keep"] * (1 - part) + values[kind] * part)
    return out
