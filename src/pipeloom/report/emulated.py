"""Conversion of an emulated iteration to a track."""

from __future__ import annotations

import numpy as np

from pipeloom.emulator import EmulatedStep
from pipeloom.report.track import Track, make_track
from pipeloom.taskgraph import BACKWARD, FORWARD, Edges, PairLabel, Pairs, Tasks, make_graph
from pipeloom.timeline import Timeline

_PS_PER_NS = 1000


def emulated_track(title: str, result: EmulatedStep) -> Track:
    """Convert an emulated iteration to a track. Only the peaks of its memory are known."""
    tasks = result.tasks
    modules = tuple(dict.fromkeys(task.module for task in tasks))
    ranks = 1 + max(task.rank for task in tasks)
    chunks = {key: i for i, key in enumerate(dict.fromkeys((task.module, task.stage) for task in tasks))}
    pairs: dict[tuple[str, int, int, int], int] = {}
    for task in tasks:
        pairs.setdefault((task.module, task.stage, task.microbatch, task.part), len(pairs))
    start, end = result.start_ps // _PS_PER_NS, result.end_ps // _PS_PER_NS
    graph = make_graph(
        name=title,
        num_ranks=ranks,
        tasks=Tasks(
            kind=[BACKWARD if task.backward else FORWARD for task in tasks],
            rank=[task.rank for task in tasks],
            duration_ns=end - start,
            pair=[pairs[task.module, task.stage, task.microbatch, task.part] for task in tasks],
            pass_id=np.arange(len(tasks)),
            microbatch=[task.microbatch for task in tasks],
            module=[modules.index(task.module) for task in tasks],
            module_names=modules,
        ),
        pairs=Pairs(
            activation_bytes=[0] * len(pairs),
            weight_gradient_bytes=None,
            labels=tuple(PairLabel(chunks[module, stage], m, part) for module, stage, m, part in pairs),
        ),
        edges=Edges(source=[], target=[], delay_ns=[]),
        static_bytes=result.static_bytes,
    )
    counts: dict[str, int] = {}
    names = []
    for module, _ in chunks:
        names.append(f"{module}.{counts.setdefault(module, 0)}")
        counts[module] += 1
    timeline = Timeline(start, end, np.array(result.peak_bytes, np.int64))
    return make_track(title, graph, None, timeline, None, tuple(names))
