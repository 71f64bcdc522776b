"""Where the ranks' idle time goes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline.schedule import Timeline
from pipeloom.timeline.simulate import memory_changes


@dataclass(frozen=True, slots=True, eq=False)
class Bubbles:
    """Idle time of every rank inside the iteration, by its cause; the causes add up to all of it.

    Attributes
    ----------
    makespan_ns : int
    warm_up_ns, cool_down_ns : array, shape (num_ranks,)
        Before the first task of the rank, and after its last.
    waiting_ns : array, shape (num_ranks, num_ranks)
        Row: the idle rank; column: the rank whose task the next one waits for.
    transfer_ns : array, shape (num_ranks,)
        Of a wait, the part after the awaited task has ended.
    memory_ns : array, shape (num_ranks,)
        Another task was ready, but did not fit beside what the rank held.
    order_ns : array, shape (num_ranks,)
        Another task was ready and fitted: the order preferred to wait (or, in a measured timeline, the
        rank was late without a reason that the graph knows).
    """

    makespan_ns: int
    warm_up_ns: IntArray
    cool_down_ns: IntArray
    waiting_ns: IntArray
    transfer_ns: IntArray
    memory_ns: IntArray
    order_ns: IntArray

    @property
    def idle_ns(self) -> IntArray:
        """Idle time of every rank, shape (num_ranks,)."""
        total: IntArray = (
            self.warm_up_ns
            + self.cool_down_ns
            + self.waiting_ns.sum(axis=1)
            + self.transfer_ns
            + self.memory_ns
            + self.order_ns
        )
        return total

    @property
    def share(self) -> float:
        """Idle part of all ranks' time, between 0 and 1."""
        whole = self.makespan_ns * len(self.warm_up_ns)
        return float(self.idle_ns.sum()) / whole if whole else 0.0


def bubbles(graph: TaskGraph, timeline: Timeline) -> Bubbles:
    """Attribute idle time.

    Parameters
    ----------
    graph : TaskGraph
        With the chosen candidates written in (`TaskGraph.with_candidates`).
    timeline : Timeline
        Planned or measured; the order on a rank is that of its starts.
    """
    ranks = range(graph.num_ranks)
    start, end = timeline.start_ns, timeline.end_ns
    ready, cause = _ready(graph, timeline)
    at_start, at_end = memory_changes(graph)
    warm_up, cool_down, transfer, memory, order = (np.zeros(graph.num_ranks, np.int64) for _ in range(5))
    waiting = np.zeros((graph.num_ranks, graph.num_ranks), np.int64)
    makespan = timeline.makespan_ns
    for rank in ranks:
        mine = np.flatnonzero(graph.rank == rank)
        mine = mine[np.lexsort((mine, end[mine], start[mine]))]
        if not len(mine):
            warm_up[rank] = makespan
            continue
        warm_up[rank] = start[mine[0]]
        cool_down[rank] = makespan - end[mine].max()
        free_at = int(start[mine[0]])
        used = int(graph.static_bytes[rank])
        for i, task in enumerate(mine):
            gap = int(start[task]) - free_at
            if gap > 0:
                blocked = mine[i:][ready[mine[i:]] < start[task]]
                blocked = blocked[at_start[blocked] >= 0]
                # The longest-ready of the tasks that could have run instead says since when, and why not.
                since = int(ready[blocked].min()) if len(blocked) else int(start[task])
                stalled = int(start[task]) - max(free_at, since)
                if stalled > 0:
                    fits = graph.capacity_bytes is None or bool(
                        (used + at_start[blocked] <= graph.capacity_bytes[rank]).any()
                    )
                    (order if fits else memory)[rank] += stalled
                    gap -= stalled
                if gap > 0:
                    source = int(cause[task]) if not len(blocked) else int(cause[blocked[ready[blocked].argmin()]])
                    came = max(free_at, int(end[source])) if source >= 0 else free_at
                    until = free_at + gap
                    on_wire = max(0, until - came)
                    transfer[rank] += on_wire
                    if gap > on_wire:
                        waiting[rank, graph.rank[source]] += gap - on_wire
            used += int(at_start[task] + at_end[task])
            free_at = max(free_at, int(end[task]))
    return Bubbles(makespan, warm_up, cool_down, waiting, transfer, memory, order)


def _ready(graph: TaskGraph, timeline: Timeline) -> tuple[IntArray, IntArray]:
    """When the predecessors allow every task, and which of them is the last to do so (-1: none)."""
    ready = np.zeros(graph.num_tasks, np.int64)
    cause = np.full(graph.num_tasks, -1, np.int64)
    target = np.repeat(np.arange(graph.num_tasks), np.diff(graph.predecessor_start))
    when = timeline.end_ns[graph.predecessor] + graph.predecessor_delay_ns
    by_time = np.argsort(when, kind="stable")
    # Later writes win, so the last predecessor stays.
    ready[target[by_time]] = when[by_time]
    cause[target[by_time]] = graph.predecessor[by_time]
    return ready, cause
