"""Traces written from simulated timelines, as torch.profiler would have recorded ranks that ran them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeloom.taskgraph import KIND_NAMES, Edges, PairLabel, Pairs, TaskGraph, Tasks, make_graph
from pipeloom.timeline import Schedule, Timeline, random_schedule, simulate

TICK_NS = 100_000
"""Times are multiples of it, so that no wait is as short as a call."""
BASE_NS = 1_790_000_000_000_000_000


@dataclass(frozen=True)
class Pipeline:
    """A chain of stages on ranks with a random order, and its timeline."""

    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    stage_of: list[int]
    """Stage of every task."""

    @property
    def num_stages(self) -> int:
        return max(self.stage_of) + 1


def random_pipeline(seed: int, *, single: bool = False) -> Pipeline:
    """Stages dealt over ranks at random (``single``: one a rank, in order), whole or split backwards, any order."""
    rng = random.Random(seed)
    num_ranks = rng.randint(1 if not single else 2, 4)
    per_rank = 1 if single else rng.randint(1, 3)
    rank_of = list(range(num_ranks)) * per_rank
    if not single:
        rng.shuffle(rank_of)
    num_stages, microbatches = len(rank_of), rng.randint(1, 5)
    split = [not single and rng.random() < 0.5 for _ in rank_of]
    kind, rank, pair, stage_of, microbatch = [], [], [], [], []
    for stage in range(num_stages):
        for m in range(microbatches):
            for k in (0, 2, 3) if split[stage] else (0, 1):
                kind.append(k)
                rank.append(rank_of[stage])
                pair.append(stage * microbatches + m)
                stage_of.append(stage)
                microbatch.append(m)
    number = {(k, s, m): i for i, (k, s, m) in enumerate(zip(kind, stage_of, microbatch, strict=True))}
    edges = []
    for (k, s, m), task in number.items():
        if k == 0 and s > 0:
            edges.append((number[0, s - 1, m], task))
        if k in (1, 2) and s + 1 < num_stages:
            edges.append((number[2 if split[s + 1] else 1, s + 1, m], task))
    delays = [rng.randint(1, 8) * TICK_NS if rank[a] != rank[b] else 0 for a, b in edges]
    graph = make_graph(
        name=f"random {seed}",
        num_ranks=num_ranks,
        tasks=Tasks(
            kind=kind,
            rank=rank,
            duration_ns=[rng.randint(1, 40) * TICK_NS for _ in kind],
            pair=pair,
            pass_id=list(range(len(kind))),
            microbatch=microbatch,
            module=[0] * len(kind),
            module_names=("model",),
        ),
        pairs=Pairs(
            activation_bytes=[0] * num_stages * microbatches,
            labels=tuple(PairLabel(p // microbatches, p % microbatches, 0) for p in range(num_stages * microbatches)),
        ),
        edges=Edges(source=[a for a, _ in edges], target=[b for _, b in edges], delay_ns=delays),
    )
    # Stages that a rank lacks would be no pipeline of that many ranks.
    schedule = random_schedule(rng, graph)
    return Pipeline(graph, schedule, simulate(graph, schedule), stage_of)


def documents(
    pipeline: Pipeline,
    *,
    iterations: int = 2,
    named: bool = True,
    shifts: tuple[int, ...] = (),
    host_ns: int = 0,
    device: bool = False,
) -> list[dict[str, Any]]:
    """Traces of all ranks, as JSON documents.

    Parameters
    ----------
    named : bool
        Ranges name their stage (``PP:1F0``), or only what they compute (``Forward 0``).
    shifts : tuple of int
        Nanoseconds that the clock of each rank is ahead.
    host_ns : int
        Of every task, the part before its first operator.
    device : bool
        The host only launches, as fast as it can; kernels compute and receive.
    """
    graph, start, end = pipeline.graph, pipeline.timeline.start_ns, pipeline.timeline.end_ns
    made = []
    for rank, order in enumerate(pipeline.schedule.order):
        events: list[dict[str, Any]] = []

        def box(name: str, begin: int, finish: int, category: str, events: list[dict[str, Any]] = events) -> None:
            events.append(
                {
                    "ph": "X",
                    "cat": category,
                    "name": name,
                    "pid": 1,
                    "tid": 1,
                    "ts": begin / 1e3,
                    "dur": (finish - begin) / 1e3,
                }
            )

        def kernel(
            name: str,
            begin: int,
            finish: int,
            launch: int,
            box: Callable[..., None] = box,
            events: list[dict[str, Any]] = events,
        ) -> None:
            args = {"args": {"correlation": len(events)}}
            box("cudaLaunchKernel", launch, launch + 1, "cuda_runtime")
            events[-1] |= args
            box(name, begin, finish, "kernel")
            events[-1] |= args

        ahead = shifts[rank] if shifts else 0
        for iteration in range(iterations):
            origin = iteration * (pipeline.timeline.makespan_ns + 10 * TICK_NS) + ahead
            box(
                f"ProfilerStep#{iteration + 3}",
                origin - TICK_NS,
                origin + pipeline.timeline.makespan_ns,
                "user_annotation",
            )
            before = host = origin
            for task in order.tolist():
                stage, m, kind = pipeline.stage_of[task], int(graph.microbatch[task]), KIND_NAMES[graph.kind[task]]
                begin, finish = origin + int(start[task]), origin + int(end[task])
                word = "F" if kind == "F" else "B"
                if device:
                    if _has_message(pipeline, task):
                        box(f"PP:{stage}RECV_{word}{m}", host, host + 900, "user_annotation")
                        box("c10d::recv_", host + 100, host + 800, "cpu_op")
                        kernel("ncclDevKernel_SendRecv", before, begin, host + 200)
                    box(f"PP:{stage}{kind}{m}", host + 1000, host + 1900, "user_annotation")
                    kernel("gemm", begin + host_ns, finish, host + 1100)
                    before, host = finish, host + 2000
                    continue
                if _has_message(pipeline, task):
                    if named:
                        box(f"PP:{stage}RECV_{word}{m}", before, before, "user_annotation")
                    box("c10d::recv_", before, before, "cpu_op")
                    box("gloo:recv", before, begin, "user_annotation")
                name = f"PP:{stage}{kind}{m}" if named else f"{'Forward' if kind == 'F' else 'Backward'} {m}"
                box(name, before, finish, "user_annotation")
                box("aten::addmm", begin + host_ns, finish, "cpu_op")
                before = finish
        made.append(
            {
                "schemaVersion": 1,
                "host_name": f"host{rank if shifts else 0}",
                "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": graph.num_ranks},
                "baseTimeNanoseconds": BASE_NS,
                "traceEvents": events,
            }
        )
    return made


def _has_message(pipeline: Pipeline, task: int) -> bool:
    graph = pipeline.graph
    return any(graph.rank[a] != graph.rank[b] for a, b in _edges_into(graph, task))


def _edges_into(graph: TaskGraph, task: int) -> list[tuple[int, int]]:
    return [(int(graph.edge_source[e]), task) for e in np.flatnonzero(graph.edge_target == task)]


def write(folder: Path, made: list[dict[str, Any]]) -> Path:
    """One file a rank."""
    folder.mkdir(exist_ok=True)
    for rank, document in enumerate(made):
        (folder / f"rank{rank}.json").write_text(json.dumps(document))
    return folder
