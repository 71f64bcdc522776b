"""Lower bounds: no schedule of a graph, under any choice of candidates, is faster.

Each bound is an argument about one rank, and the best over all ranks and arguments is the answer. Where
pairs have candidates, every duration below is the least over them, unless said otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.lazy import lazy_module
from pipeloom.taskgraph import FORWARD, INPUT_GRADIENT, NO_TASK, IntArray, TaskGraph
from pipeloom.timeline.bounds_memory import held_byte_ns, memory_bound
from pipeloom.timeline.check import check
from pipeloom.timeline.options import Options, keeping_off_host, pair_options, without_too_large
from pipeloom.timeline.schedule import LowerBound, Schedule, Timeline
from pipeloom.timeline.simulate import within_limits

if TYPE_CHECKING:
    from pipeloom.timeline import kernels
else:
    kernels = lazy_module("pipeloom.timeline.kernels")

BoolArray = npt.NDArray[np.bool_]


def lower_bound(graph: TaskGraph) -> LowerBound:
    """Nanoseconds that no schedule of a graph can beat: the best of the bounds below; ``name`` is the one that binds.

    - ``critical path``: the longest path of tasks and delays.
    - ``head + work + tail``: on some rank, the least time before its first task, all its work, and the least
      time after its last one.
    - ``fill + work + drain``: the same with stronger ends, see `_fill`.
    - ``memory``: bytes times the least time that they are held, against what the rank can hold in all; with
      candidates, weighed against work, since a pair cannot be both lean and fast; the less of offloading, with what it
      stages taken off the room, and of not offloading.
    """
    options = without_too_large(graph, pair_options(graph))
    duration, longest = extreme_durations(graph, options)
    head, tail = heads_and_tails(graph, duration)
    found = [LowerBound(int((head + duration + tail).max()), "critical path")]
    present = [rank for rank in range(graph.num_ranks) if (graph.rank == rank).any()]
    fill = _fill(graph, duration, longest, head)
    drain = _drain(graph, duration, longest, tail)
    total = options.forward_ns + options.backward_ns + options.weight_ns
    pair_rank = graph.rank[graph.forward_of]
    ways = _ways_to_hold(graph, options, duration)
    for rank in present:
        mine = graph.rank == rank
        of_rank = pair_rank == rank
        first, last = int(head[mine].min()), int(tail[mine].min())
        work = int(total[of_rank].min(axis=1).sum())
        found.append(LowerBound(first + work + last, "head + work + tail"))
        strong = max(first, fill[rank]) + work + max(last, drain[rank])
        found.append(LowerBound(strong, "fill + work + drain"))
        # A way with less than no room is none.
        under = [
            memory_bound(
                way.total_ns[of_rank], way.held[of_rank], int(way.room_bytes[rank]), first, last, strong - work
            )
            for way in ways
            if way.room_bytes[rank] >= 0
        ]
        found.append(LowerBound(min(under, default=0), "memory"))
    return max(found, key=lambda bound: bound.ns)


def bound_of(graph: TaskGraph, schedule: Schedule, timeline: Timeline) -> LowerBound:
    """Return the lower bound that belongs to a simulated schedule: one that exceeds a limit may beat `lower_bound`.

    Its bound is that of the graph without limits.
    """
    if not within_limits(graph, schedule, timeline) and check(graph, schedule):
        graph = replace(graph, capacity_bytes=None, host_capacity_bytes=None)
    return lower_bound(graph)


class _Way(NamedTuple):
    """Candidates that a rank's pairs may have, and what room it has for them."""

    total_ns: IntArray
    held: npt.NDArray[np.float64]
    room_bytes: IntArray


def _ways_to_hold(graph: TaskGraph, options: Options, duration: IntArray) -> list[_Way]:
    """How a rank may hold its pairs: one way for all, or, where offloading stages something, with it and without.

    Any schedule has, on every rank, pairs that hold nothing on the host, or what is staged taken off its room. So what
    holds of a rank both ways, holds of it.
    """
    room = graph.most_room_bytes
    if room is None:
        return []
    each = [(options, room)]
    if graph.staging_bytes is not None:
        each = [(options, room - graph.staging_bytes), (keeping_off_host(options), room)]
    held = held_byte_ns(graph, [some for some, _ in each], duration)
    return [
        _Way(some.forward_ns + some.backward_ns + some.weight_ns, byte_ns, left)
        for (some, left), byte_ns in zip(each, held, strict=True)
    ]


def extreme_durations(graph: TaskGraph, options: Options) -> tuple[IntArray, IntArray]:
    """Least and most time of every task over the candidates of its pair."""
    least, most = graph.duration_ns.copy(), graph.duration_ns.copy()
    tables = (
        (graph.forward_of, options.forward_ns),
        (graph.backward_of, options.backward_ns),
        (graph.weight_of, options.weight_ns),
    )
    for tasks, table in tables:
        has = tasks != NO_TASK
        least[tasks[has]] = table[has].min(axis=1)
        most[tasks[has]] = table[has].max(axis=1)
    return least, most


def heads_and_tails(graph: TaskGraph, duration: IntArray) -> tuple[IntArray, IntArray]:
    """Longest path of tasks and delays up to the start of every task, and from its end to the end of all."""
    everything = np.arange(graph.num_tasks, dtype=np.int64)
    no_order = np.zeros(1, np.int64)
    both = []
    for rows, other, delay, count in (
        (graph.successor_start, graph.successor, graph.successor_delay_ns, np.diff(graph.predecessor_start)),
        (graph.predecessor_start, graph.predecessor, graph.predecessor_delay_ns, np.diff(graph.successor_start)),
    ):
        start, end, after, queue = (np.empty(graph.num_tasks, np.int64) for _ in range(4))
        kernels.retime(everything, no_order, duration, rows, other, delay, count, start, end, after, queue)
        both.append(start)
    return both[0], both[1]


def _fill(graph: TaskGraph, least: IntArray, most: IntArray, head: IntArray) -> list[int]:
    """Least idle time of every rank before the first pass that ends on the last rank reaches it.

    Let J be, of the forward passes that a backward waits for, the one that starts first on the last rank.
    Until J starts there no backward runs anywhere. Let A_r be the start of J on rank r and X_r the work done
    there before. What was done on rank r + 1 before A_{r+1} had been done on rank r by A_{r+1} less the least
    delay d, and is not J, so with equal durations X_{r+1} <= X_r + A_{r+1} - d - A_r - f(J, r), that is
    idle_{r+1} >= idle_r + f(J, r) + d, even when passes overtake one another. Work on rank r + 1 that is
    longer than on rank r, or has no counterpart there, is subtracted.

    Needs: every backward descends from forwards on the last rank that are part of a pass over all ranks, in
    rank order. Where that does not hold, the bounds are zero.
    """
    first = [int(head[graph.rank == r].min(initial=0)) for r in range(graph.num_ranks)]
    return _chain(
        graph,
        graph.kind == FORWARD,
        _Links(graph.predecessor_start, graph.predecessor, graph.predecessor_delay_ns),
        least,
        most,
        first,
    )


def _drain(graph: TaskGraph, least: IntArray, most: IntArray, tail: IntArray) -> list[int]:
    """Mirror image of `_fill` in time; backwards that are split fill the drain, so none is claimed for them.

    The two windows of a rank do not overlap: every forward ends before the last backward pass begins on
    the last rank, hence before it ends on this one, and the first window ends at a forward's start.
    """
    if (graph.kind >= INPUT_GRADIENT).any():
        return [0] * graph.num_ranks
    last = [int(tail[graph.rank == r].min(initial=0)) for r in range(graph.num_ranks)]
    return _chain(
        graph,
        graph.kind != FORWARD,
        _Links(graph.successor_start, graph.successor, graph.successor_delay_ns),
        least,
        most,
        last,
    )


class _Links(NamedTuple):
    """Compressed rows, by task, of what comes before it, and how long a result takes from there."""

    rows: IntArray
    neighbour: IntArray
    delay: IntArray


def _chain(
    graph: TaskGraph, inside: BoolArray, links: _Links, least: IntArray, most: IntArray, floor: list[int]
) -> list[int]:
    """Idle time by rank that passes of the ``inside`` tasks cause; ``links`` name what comes before them.

    ``floor``: idle time of every rank known otherwise.
    """
    none = [0] * graph.num_ranks
    turning = _turning(graph, inside, links.rows, links.neighbour)
    if not turning:
        return none
    # slot[s, r]: the inside task of segment s on rank r.
    slot = np.full((graph.num_segments, graph.num_ranks), NO_TASK, np.int64)
    tasks = np.flatnonzero(inside)
    slot[graph.segment[tasks], graph.rank[tasks]] = tasks
    linked = _delays_along_segments(graph, tasks, *links)
    passes = slot[graph.segment[np.array(turning)]]
    if (passes == NO_TASK).any() or (linked[passes[:, 1:]] < 0).any():
        return none
    idle = np.full(len(passes), floor[0], np.int64)
    answer = [floor[0]]
    for rank in range(1, graph.num_ranks):
        here = tasks[graph.rank[tasks] == rank]
        has = linked[here] >= 0
        matched = here[has]
        before = slot[graph.segment[matched], rank - 1]
        excess = int(np.maximum(0, most[matched] - least[before]).sum() + most[here[~has]].sum())
        wire = int(linked[matched].min())
        idle = np.maximum(idle + least[passes[:, rank - 1]] + wire - excess, floor[rank])
        answer.append(int(idle.min()))
    return answer


def _turning(graph: TaskGraph, inside: BoolArray, rows: IntArray, neighbour: IntArray) -> list[int]:
    """Inside tasks on the last rank, such that every outside task has one of them before it; empty: none.

    It is enough that each outside task without another outside task before it has one directly before it.
    """
    target = np.repeat(np.arange(graph.num_tasks), np.diff(rows))
    outside_before = np.zeros(graph.num_tasks, bool)
    outside_before[target[~inside[neighbour]]] = True
    roots = set(np.flatnonzero(~inside & ~outside_before).tolist())
    crossing = ~inside[target] & inside[neighbour] & (graph.rank[neighbour] == graph.num_ranks - 1)
    found: dict[int, int] = {}
    for root, task in zip(target[crossing].tolist(), neighbour[crossing].tolist(), strict=True):
        # Its own pair, where it is among them, serves only this root; so the set stays small.
        if root in roots and (root not in found or graph.pair[root] == graph.pair[task]):
            found[root] = task
    return sorted(set(found.values())) if roots and len(found) == len(roots) else []


def _delays_along_segments(
    graph: TaskGraph, tasks: IntArray, rows: IntArray, neighbour: IntArray, delay: IntArray
) -> IntArray:
    """Per task the delay of its edge with its own segment's task on the rank before; -1: no such edge."""
    target = np.repeat(np.arange(graph.num_tasks), np.diff(rows))
    same = (graph.segment[target] == graph.segment[neighbour]) & (graph.rank[target] == graph.rank[neighbour] + 1)
    linked = np.full(graph.num_tasks, -1, np.int64)
    np.maximum.at(linked, target[same], delay[same])
    kept = np.full(graph.num_tasks, -1, np.int64)
    kept[tasks] = linked[tasks]
    return kept
