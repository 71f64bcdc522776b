"""Where a rank's time goes that it computes nothing, by cause; of a measured timeline and of a replayed one alike."""

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
"""Of idle time, in the order of `idle_by_cause`'s columns.

warm-up
    Before the first computation of the rank.
waiting for a forward, for a backward
    What the next task takes is still being computed.
communication
    It has been computed, and is under way.
own message not taken
    The rank waits until a message of its own is received by a rank that does something else.
host
    The rank could compute and does not: Python, posting of messages, launches.
cool-down
    After the last computation of the rank.
"""
_WARM_UP, _FORWARD, _BACKWARD, _COMMUNICATION, _TAKEN, _HOST, _COOL_DOWN = range(len(CAUSES))


def idle_by_cause(made: ReplayGraph, kept: Timeline) -> IntArray:
    """Attribute idle time of a timeline of a replayable iteration.

    Parameters
    ----------
    kept : Timeline
        When tasks had their ranks: measured (``made.kept``), or simulated.

    Returns
    -------
    array, shape (num_ranks, len(CAUSES))
        Nanoseconds. A row adds up to the makespan less what the rank computed.
    """
    graph = made.graph
    compute_start = kept.start_ns + (made.computed.start_ns - made.kept.start_ns)
    compute_end = compute_start + (made.computed.end_ns - made.computed.start_ns)
    makespan = int(compute_end.max())
    found = np.zeros((graph.num_ranks, len(CAUSES)), np.int64)
    for rank, order in enumerate(made.schedule.order):
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
    """Of what a task waits for on other ranks, what came last; -1: nothing."""
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
