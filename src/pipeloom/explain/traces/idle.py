"""Idle time of ranks by cause, for measured and replayed timelines."""

from __future__ import annotations

import numpy as np

from pipeloom.explain.traces.replay import ReplayGraph
from pipeloom.taskgraph import FORWARD, IntArray, TaskGraph
from pipeloom.timeline import Timeline

CAUSES = (
    "warm-up",
    "waiting for a forward",
    "waiting for a backward",
    "communication",
    "own message not taken",
    "host",
    "cool-down",
)
"""Causes of idle time, in the order of the columns of `idle_by_cause`.

warm-up
    Before the first computation of the rank.
waiting for a forward, for a backward
    The input of the next task is still being computed.
communication
    The input has been computed and is being transferred.
own message not taken
    The rank waits until a busy rank receives its message.
host
    The rank could compute but does not, because of Python, posting of messages, or kernel launches.
cool-down
    After the last computation of the rank.
"""
_WARM_UP, _FORWARD, _BACKWARD, _COMMUNICATION, _TAKEN, _HOST, _COOL_DOWN = range(len(CAUSES))


def idle_by_cause(replay: ReplayGraph, kept: Timeline) -> IntArray:
    """Return the idle nanoseconds of a timeline by cause, shape (num_ranks, len(CAUSES)).

    ``kept`` has the times for which tasks occupy their ranks, measured (``replay.kept``) or simulated. A row adds up to
    the makespan less the rank's time of computation.
    """
    graph = replay.graph
    compute_start = kept.start_ns + (replay.computed.start_ns - replay.kept.start_ns)
    compute_end = compute_start + (replay.computed.end_ns - replay.computed.start_ns)
    makespan = int(compute_end.max())
    found = np.zeros((graph.num_ranks, len(CAUSES)), np.int64)
    for rank, order in enumerate(replay.schedule.order):
        row = found[rank]
        row[_WARM_UP] = compute_start[order[0]]
        row[_COOL_DOWN] = makespan - compute_end[order[-1]]
        for before, task in zip(order[:-1].tolist(), order[1:].tolist(), strict=True):
            gap = int(compute_start[task] - compute_end[before])
            idle = int(kept.start_ns[task] - kept.end_ns[before])
            source = _last_input(graph, kept, task) if idle > 0 else -1
            if source >= 0:
                from_ns, until_ns = int(kept.end_ns[before]), int(kept.start_ns[task])
                computed_ns = min(max(int(compute_end[source]), from_ns), until_ns)
                row[_cause_of(graph, source, task)] += computed_ns - from_ns
                row[_COMMUNICATION] += until_ns - computed_ns
                gap -= idle
            row[_HOST] += gap
    return found


def _last_input(graph: TaskGraph, kept: Timeline, task: int) -> int:
    """Return the predecessor on another rank that allows a task last; -1 without any."""
    here = slice(graph.predecessor_start[task], graph.predecessor_start[task + 1])
    sources = graph.predecessor[here]
    elsewhere = graph.rank[sources] != graph.rank[task]
    if not elsewhere.any():
        return -1
    when = (kept.end_ns[sources] + graph.predecessor_delay_ns[here])[elsewhere]
    return int(sources[elsewhere][when.argmax()])


def _cause_of(graph: TaskGraph, source: int, task: int) -> int:
    if graph.microbatch[source] != graph.microbatch[task]:
        return _TAKEN
    return _FORWARD if graph.kind[task] == FORWARD else _BACKWARD
