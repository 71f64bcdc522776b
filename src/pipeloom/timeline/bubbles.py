"""Attribution of idle time to causes."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline.schedule import Timeline
from pipeloom.timeline.simulate import memory_changes


@dataclass(frozen=True, slots=True, eq=False)
class Bubbles:
    """Idle time of every rank in the iteration, by cause. The causes add up to all idle time.

    Attributes
    ----------
    makespan_ns : int
        Duration of the iteration.
    warm_up_ns, cool_down_ns : array, shape (num_ranks,)
        Time before the first task of the rank, and after its last.
    waiting_ns : array, shape (num_ranks, num_ranks)
        Waiting time; row: the idle rank; column: the rank whose task the next task waits for.
    transfer_ns : array, shape (num_ranks,)
        Waiting time after the awaited task has ended.
    memory_ns : array, shape (num_ranks,)
        Time in which another task was ready but did not fit into memory.
    order_ns : array, shape (num_ranks,)
        Time in which another task was ready and fit, but was not next in the order. In a measured timeline, this
        includes delays with no cause in the graph.
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
        ends, waiting = self.warm_up_ns + self.cool_down_ns, self.waiting_ns.sum(axis=1) + self.transfer_ns
        total: IntArray = ends + waiting + self.memory_ns + self.order_ns
        return total

    @property
    def share(self) -> float:
        """Idle share of all ranks' time, between 0 and 1."""
        whole = self.makespan_ns * len(self.warm_up_ns)
        return float(self.idle_ns.sum()) / whole if whole else 0.0


def bubbles(graph: TaskGraph, timeline: Timeline) -> Bubbles:
    """Attribute idle time to causes.

    Parameters
    ----------
    graph : TaskGraph
        The graph with the chosen candidates (`TaskGraph.with_candidates`).
    timeline : Timeline
        Planned or measured times. Starts define the order on each rank.
    """
    start, end = timeline.start_ns, timeline.end_ns
    ready, cause = _ready(graph, timeline)
    at_start, at_end = memory_changes(graph)
    warm_up, cool_down, transfer, memory, order = (np.zeros(graph.num_ranks, np.int64) for _ in range(5))
    waiting = np.zeros((graph.num_ranks, graph.num_ranks), np.int64)
    makespan = timeline.makespan_ns
    for rank in range(graph.num_ranks):
        mine = np.flatnonzero(graph.rank == rank)
        mine = mine[np.lexsort((mine, end[mine], start[mine]))]
        if not len(mine):
            warm_up[rank] = makespan
            continue
        warm_up[rank] = start[mine[0]]
        cool_down[rank] = makespan - end[mine].max()
        free_at = np.maximum.accumulate(np.concatenate([start[mine[:1]], end[mine[:-1]]]))
        places = np.flatnonzero(start[mine] > free_at)
        changes = at_start[mine] + at_end[mine]
        used = graph.static_bytes[rank] + np.cumsum(changes) - changes
        first = _first_ready(ready[mine])
        free_bytes = None
        if graph.capacity_bytes is not None:
            least = _least_ready_bytes(places, start[mine], ready[mine], at_start[mine])
            free_bytes = graph.capacity_bytes[rank] - used[places] - least
        for number, place in enumerate(places.tolist()):
            task, free, until = int(mine[place]), int(free_at[place]), int(start[mine[place]])
            # Of the tasks that could have run instead, attribute the time since the first was ready.
            other = int(mine[first[place]])
            if ready[other] < until:
                task, since = other, max(free, int(ready[other]))
                (order if free_bytes is None or free_bytes[number] >= 0 else memory)[rank] += until - since
                until = since
            if until > free:
                source = int(cause[task])
                sent = max(free, int(end[source])) if source >= 0 else free
                in_transfer = max(0, until - sent)
                transfer[rank] += in_transfer
                if until - free > in_transfer:
                    waiting[rank, graph.rank[source]] += until - free - in_transfer
    return Bubbles(makespan, warm_up, cool_down, waiting, transfer, memory, order)


def _first_ready(ready: IntArray) -> IntArray:
    """Return, for every place of a rank's order, the task from there on that was ready first. Ties: the first."""
    backwards = ready[::-1]
    records = np.where(backwards == np.minimum.accumulate(backwards), np.arange(len(ready)), 0)
    first: IntArray = (len(ready) - 1 - np.maximum.accumulate(records))[::-1]
    return first


def _least_ready_bytes(places: IntArray, start: IntArray, ready: IntArray, num_bytes: IntArray) -> IntArray:
    """Return for each place the least bytes of a task that was ready before the place began and is not listed earlier.

    Places are in order of their starts, so a heap visits every task at most twice. Scanning the rest of the order for
    each place is too slow. If no task was ready, the value is arbitrary.
    """
    least = np.zeros(len(places), np.int64)
    sequence = np.argsort(ready, kind="stable")
    counts = np.searchsorted(ready[sequence], start[places]).tolist()
    found: list[tuple[int, int]] = []
    begin = 0
    for number, (place, count) in enumerate(zip(places.tolist(), counts, strict=True)):
        for task in sequence[begin:count].tolist():
            heappush(found, (int(num_bytes[task]), task))
        begin = count
        while found and found[0][1] < place:
            heappop(found)
        if found:
            least[number] = found[0][0]
    return least


def _ready(graph: TaskGraph, timeline: Timeline) -> tuple[IntArray, IntArray]:
    """Return the time at which the predecessors allow each task, and the last of them (-1: none)."""
    ready = np.zeros(graph.num_tasks, np.int64)
    cause = np.full(graph.num_tasks, -1, np.int64)
    target = np.repeat(np.arange(graph.num_tasks), np.diff(graph.predecessor_start))
    when = timeline.end_ns[graph.predecessor] + graph.predecessor_delay_ns
    by_time = np.argsort(when, kind="stable")
    # Later writes win, so the latest predecessor remains.
    ready[target[by_time]] = when[by_time]
    cause[target[by_time]] = graph.predecessor[by_time]
    return ready, cause
