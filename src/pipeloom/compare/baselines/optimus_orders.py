"""Optimus' schedules (Feng et al., ATC 2025): encoder work before the backbone's, or in the bubbles of its pipeline.

The backbone's timeline is fixed as if encoders took no time. A microbatch's encoder forward may run in any bubble
before the backbone's first pass of that microbatch (its forward dependency point), and its backward in any bubble after
the backbone's last pass (its backward dependency point). Work that fits in no bubble stays in its place of the coarse
schedule: before the backbone begins, or after it ends. Optimus also fills waits for tensor-parallel messages inside a
pass. Here these are part of the pass, so only bubbles between passes are filled.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, replace

import numpy as np

from pipeloom.errors import InputError
from pipeloom.search.stage_chain import as_schedule, chain_of
from pipeloom.search.static_orders import interleaved_orders
from pipeloom.taskgraph import FORWARD, IntArray, TaskGraph, with_delays
from pipeloom.timeline import Schedule, running_order, simulate

_FAR = 1 << 60


def optimus_coarse(graph: TaskGraph) -> Schedule:
    """Run the encoders' forwards for all microbatches, then the backbone by 1F1B, then the encoders' backwards.

    The last module is the backbone; its chunks may be interleaved. A rank continues as soon as its next task is ready,
    so the encoders' work fills the warm-up and cool-down of the backbone's pipeline. Raise `InputError` if the graph
    has no labels, or only one module.
    """
    if graph.labels is None:
        raise InputError("graph", "has no labels", "baselines need a graph that was made from a layout")
    if len(graph.module_names) < 2:
        raise InputError("graph", "has one module", "Optimus needs encoders and a backbone")
    encoders, backbone = graph.module_names[:-1], graph.module_names[-1]
    middle = interleaved_orders(chain_of(graph, [backbone]), graph.num_ranks)
    around = chain_of(graph, encoders)
    order: list[list[int]] = []
    for rank in range(graph.num_ranks):
        stages = around.stages_of(rank)
        turns = [(stage, m) for m in range(around.num_microbatches) for stage in stages]
        back = [(stage, m) for m in range(around.num_microbatches) for stage in reversed(stages)]
        ahead = [task for unit in turns for task in around.forward.get(unit, [])]
        behind = [task for unit in back for task in around.backward.get(unit, [])]
        order.append([*ahead, *middle[rank], *behind])
    return as_schedule(graph, order, "optimus coarse")


def optimus_fine(graph: TaskGraph) -> Schedule:
    """Fill the bubbles of the backbone's pipeline with the encoders' work.

    Forwards take the latest possible bubbles, the last microbatch first; backwards the earliest, the first microbatch
    first. So work with few possible bubbles still finds one, and encodings and gradients are held as briefly as
    possible. Raise `InputError` as `optimus_coarse`.
    """
    coarse = optimus_coarse(graph)
    encodes = graph.module != len(graph.module_names) - 1
    place, start = places(graph, coarse), backbone_alone(graph, coarse)
    # Forwards without a consumer may run until the backbone has ended.
    end = int((start + graph.duration_ns)[~encodes].max(initial=0))
    bubbles = [
        _Bubbles(graph, start, np.flatnonzero(~encodes & (graph.rank == rank))) for rank in range(graph.num_ranks)
    ]
    duration, rank = graph.duration_ns.tolist(), graph.rank.tolist()
    forwards = np.flatnonzero(encodes & (graph.kind == FORWARD))
    for task in _in_turn(graph, forwards, place)[::-1]:
        rows = slice(graph.successor_start[task], graph.successor_start[task + 1])
        after, delay = graph.successor[rows], graph.successor_delay_ns[rows]
        ahead = graph.kind[after] == FORWARD
        latest = int((start[after] - delay)[ahead].min(initial=end))
        start[task] = bubbles[rank[task]].latest(duration[task], latest)
    for task in _in_turn(graph, np.flatnonzero(encodes & (graph.kind != FORWARD)), place):
        rows = slice(graph.predecessor_start[task], graph.predecessor_start[task + 1])
        before = graph.predecessor[rows]
        ends = start[before] + graph.duration_ns[before] + graph.predecessor_delay_ns[rows]
        start[task] = bubbles[rank[task]].earliest(duration[task], int(ends.max(initial=-_FAR)))
    return by_start(graph, start, place, "optimus fine")


def places(graph: TaskGraph, schedule: Schedule) -> IntArray:
    """Return the place of every task in an order of all tasks that respects every edge."""
    place = np.empty(graph.num_tasks, np.int64)
    place[running_order(graph, schedule)] = np.arange(graph.num_tasks)
    return place


def by_start(graph: TaskGraph, start: IntArray, place: IntArray, name: str) -> Schedule:
    """Run tasks by start time, then by place. Both respect every edge, so the order does too."""
    listed = np.lexsort((place, start))
    order = [listed[graph.rank[listed] == rank].tolist() for rank in range(graph.num_ranks)]
    return as_schedule(graph, order, name)


def backbone_alone(graph: TaskGraph, coarse: Schedule) -> IntArray:
    """Return start times as if only the last module's tasks took time; those of other tasks have no meaning."""
    encodes = graph.module != len(graph.module_names) - 1
    touched = encodes[graph.edge_source] | encodes[graph.edge_target]
    alone = replace(
        with_delays(graph, np.where(touched, 0, graph.edge_delay_ns)),
        duration_ns=np.where(encodes, 0, graph.duration_ns),
        candidates=None,
    )
    return simulate(alone, replace(coarse, candidate=None)).start_ns


def _in_turn(graph: TaskGraph, tasks: IntArray, place: IntArray) -> list[int]:
    """Sort tasks by microbatch, then in an order that respects the edges."""
    ordered: list[int] = tasks[np.lexsort((place[tasks], graph.microbatch[tasks]))].tolist()
    return ordered


@dataclass
class _Bubbles:
    """Idle intervals of one rank, also before the backbone begins and after it ends."""

    free: list[tuple[int, int]]

    def __init__(self, graph: TaskGraph, start: IntArray, tasks: IntArray) -> None:
        begins = np.sort(start[tasks])
        ends = np.sort((start + graph.duration_ns)[tasks])
        edges = zip([-_FAR, *ends.tolist()], [*begins.tolist(), _FAR], strict=True)
        self.free = [(a, b) for a, b in edges if a < b]

    def latest(self, duration: int, until: int) -> int:
        """Reserve the latest interval that ends by ``until``; return its start."""
        last = bisect_right(self.free, (until - duration, _FAR)) - 1
        for i in range(last, -1, -1):
            a, b = self.free[i]
            begin = min(b, until) - duration
            if begin >= a:
                self._take(i, begin, begin + duration)
                return begin
        raise AssertionError("the time before the backbone is unlimited")

    def earliest(self, duration: int, since: int) -> int:
        """Reserve the earliest interval that begins at ``since`` or later; return its start."""
        first = max(0, bisect_right(self.free, (since, _FAR)) - 1)
        for i in range(first, len(self.free)):
            a, b = self.free[i]
            begin = max(a, since)
            if begin + duration <= b:
                self._take(i, begin, begin + duration)
                return begin
        raise AssertionError("the time after the backbone is unlimited")

    def _take(self, i: int, begin: int, end: int) -> None:
        a, b = self.free.pop(i)
        for left in ((a, begin), (end, b)):
            if left[0] < left[1]:
                insort(self.free, left)
