"""Chrome trace JSON, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pipeloom.report.track import Box, Track, boxes, key_figures
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import memory_curve

_NS_PER_US = 1000


def trace(tracks: Sequence[Track], *, arrows: bool = False) -> str:
    """Write tracks as one Chrome trace.

    Parameters
    ----------
    tracks : sequence of Track
        Each track becomes a process, with one thread and one memory counter per rank.
    arrows : bool
        Draw an arrow for every edge between two ranks.

    Returns
    -------
    str
        A JSON object with times in microseconds, as the format requires.
    """
    events: list[dict[str, Any]] = []
    other: dict[str, Any] = {}
    for number, track in enumerate(tracks, start=1):
        events += _track_events(track, number, arrows)
        numbers = key_figures(track)
        other[f"{number}. {track.title}"] = (
            f"makespan {numbers.makespan_ns / 1e6:.6f} ms, bubbles {100 * numbers.bubble_share:.2f} %"
        )
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"


def _track_events(track: Track, process: int, arrows: bool) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        _name("process_name", process, 0, name=track.title),
        _name("process_sort_index", process, 0, sort_index=process),
    ]
    for rank in range(track.graph.num_ranks):
        events.append(_name("thread_name", process, rank, name=f"rank {rank}"))
        events.append(_name("thread_sort_index", process, rank, sort_index=rank))
    events += [_task_event(track.graph, box, process) for box in boxes(track)]
    for rank in range(track.graph.num_ranks):
        moments, sizes = memory_curve(track.graph, track.timeline, rank)
        events += [
            {
                "ph": "C",
                "name": f"memory of rank {rank}",
                "pid": process,
                "tid": rank,
                "ts": moment / _NS_PER_US,
                "args": {"bytes": size},
            }
            for moment, size in zip(moments.tolist(), sizes.tolist(), strict=True)
        ]
    return events + (_arrow_events(track, process) if arrows else [])


def _name(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _task_event(graph: TaskGraph, box: Box, process: int) -> dict[str, Any]:
    args: dict[str, Any] = {
        "task": box.task,
        "module": box.module,
        "chunk": box.chunk,
        "microbatch": box.microbatch,
        "sub_microbatch": box.sub_microbatch or 0,
        "activation_bytes": box.activation_bytes,
        "planned_s": int(graph.duration_ns[box.task]) / 1e9,
    }
    if box.strategy:
        args["strategy"] = box.strategy
    return {
        "ph": "X",
        "name": box.name,
        "cat": f"{box.kind},{box.module}",
        "pid": process,
        "tid": box.rank,
        "ts": box.start_ns / _NS_PER_US,
        "dur": (box.end_ns - box.start_ns) / _NS_PER_US,
        "args": args,
    }


def _arrow_events(track: Track, process: int) -> list[dict[str, Any]]:
    graph, events = track.graph, []
    start, end = track.timeline.start_ns, track.timeline.end_ns
    for number, (source, target) in enumerate(zip(graph.edge_source.tolist(), graph.edge_target.tolist(), strict=True)):
        if graph.rank[source] == graph.rank[target]:
            continue
        common = {"name": "message", "cat": "message", "id": f"{process}.{number}", "pid": process}
        # Arrows bind to the slice that encloses their end, so move it just inside the box.
        leave = max(int(end[source]) - 1, int(start[source])) / _NS_PER_US
        events.append(common | {"ph": "s", "tid": int(graph.rank[source]), "ts": leave})
        events.append(
            common | {"ph": "f", "bp": "e", "tid": int(graph.rank[target]), "ts": int(start[target]) / _NS_PER_US}
        )
    return events
