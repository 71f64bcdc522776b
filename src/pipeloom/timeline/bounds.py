"""Lower bounds on the makespan of every schedule of a graph, under every choice of candidates.

Each bound is an argument about one rank; the result is the largest over all ranks and arguments. If pairs have
candidates, every duration below is the least over them, unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.lazy import lazy_module
from pipeloom.taskgraph import FORWARD, INPUT_GRADIENT, NO_TASK, Assignable, IntArray, TaskGraph
from pipeloom.timeline.bounds_memory import held_byte_ns, memory_bound
from pipeloom.timeline.check import check
from pipeloom.timeline.options import Options, pair_options, without_host_bytes, without_oversized
from pipeloom.timeline.schedule import LowerBound, Schedule, Timeline
from pipeloom.timeline.simulate import within_limits

if TYPE_CHECKING:
    from pipeloom.timeline import kernels
else:
    kernels = lazy_module("pipeloom.timeline.kernels")

BoolArray = npt.NDArray[np.bool_]


def lower_bound(graph: TaskGraph) -> LowerBound:
    """Return the largest of these lower bounds on the makespan of a graph; ``name`` is the bound that binds.

    - ``critical path``: the longest path of tasks and delays.
    - ``warm-up + work + cool-down``: on some rank, the least time before its first task, all its work, and the least
      time after its last task. Warm-up and cool-down are longest paths or, where larger, idle time that passes over
      all ranks cause; see `_warm_up`.
    - ``memory``: bytes times the least time that they are held, divided by the rank's free memory. With candidates,
      it is weighed against work, since no candidate is both the smallest and the fastest. If offloading stages bytes,
      it is the smaller of two bounds: with offloading and less free memory, and without offloading.

    Parameters
    ----------
    graph : TaskGraph
        Tasks, dependencies and memory limits.
    """
    options = without_oversized(graph, pair_options(graph))
    duration, longest = extreme_durations(graph, options)
    head, tail = longest_paths(graph, duration)
    found = [LowerBound(int((head + duration + tail).max()), "critical path")]
    present = [rank for rank in range(graph.num_ranks) if (graph.rank == rank).any()]
    warm_up = _warm_up(graph, duration, longest, head)
    cool_down = _cool_down(graph, duration, longest, tail)
    total = options.forward_ns + options.backward_ns + options.weight_ns
    pair_rank = graph.rank[graph.forward_of]
    memory_cases = _memory_cases(graph, options, duration)
    for rank in present:
        mine = graph.rank == rank
        of_rank = pair_rank == rank
        first, last = int(head[mine].min()), int(tail[mine].min())
        work = int(total[of_rank].min(axis=1).sum())
        ends = max(first, warm_up[rank]) + max(last, cool_down[rank])
        found.append(LowerBound(ends + work, "warm-up + work + cool-down"))
        # A case with negative free memory has no schedule.
        under = [
            memory_bound(case.total_ns[of_rank], case.held[of_rank], int(case.free_bytes[rank]), first, last, ends)
            for case in memory_cases
            if case.free_bytes[rank] >= 0
        ]
        found.append(LowerBound(min(under, default=0), "memory"))
    return max(found, key=lambda bound: bound.ns)


def bound_of(graph: TaskGraph, schedule: Schedule, timeline: Timeline) -> LowerBound:
    """Return the lower bound for a simulated schedule.

    A schedule that exceeds a memory limit may be faster than `lower_bound`, so its bound ignores the limits.
    """
    if not within_limits(graph, schedule, timeline) and check(graph, schedule):
        graph = replace(graph, capacity_bytes=None, host_capacity_bytes=None)
    return lower_bound(graph)


class _MemoryCase(NamedTuple):
    """Work and byte-nanoseconds by pair and candidate, and the free memory of every rank for them."""

    total_ns: IntArray
    held: npt.NDArray[np.float64]
    free_bytes: IntArray


def _memory_cases(graph: TaskGraph, options: Options, duration: IntArray) -> list[_MemoryCase]:
    """Return one case, or two if offloading stages bytes: with offloading and without.

    In any schedule, the pairs of a rank either hold nothing on the host, or the rank's memory is reduced by staging. So
    the smaller bound of the two cases holds.
    """
    free_bytes = graph.most_headroom_bytes
    if free_bytes is None:
        return []
    each = [(options, free_bytes)]
    if graph.staging_bytes is not None:
        each = [(options, free_bytes - graph.staging_bytes), (without_host_bytes(options), free_bytes)]
    held = held_byte_ns(graph, [some for some, _ in each], duration)
    return [
        _MemoryCase(some.forward_ns + some.backward_ns + some.weight_ns, byte_ns, left)
        for (some, left), byte_ns in zip(each, held, strict=True)
    ]


def extreme_durations(graph: TaskGraph, options: Options) -> tuple[IntArray, IntArray]:
    """Return the least and the largest duration of every task over the candidates of its pair."""
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


def longest_paths(graph: TaskGraph, duration: IntArray) -> tuple[IntArray, IntArray]:
    """Return the longest path of tasks and delays to the start of every task, and from its end to the end of all."""
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


def _warm_up(graph: TaskGraph, least: IntArray, most: IntArray, head: IntArray) -> list[int]:
    """Return the least idle time of every rank before the first pass that ends on the last rank reaches it.

    Of the forward passes that a backward waits for, let J be the one that starts first on the last rank. Until J
    starts there, no backward runs anywhere. Let A_r be the start of J on rank r and X_r the work done there before.
    Work done on rank r + 1 before A_{r+1} had been done on rank r by A_{r+1} less the least delay d, and is not J. So
    with equal durations X_{r+1} <= X_r + A_{r+1} - d - A_r - f(J, r), that is,
    idle_{r+1} >= idle_r + f(J, r) + d, even if passes overtake one another. Work on rank r + 1 that is longer than on
    rank r, or has no counterpart there, is subtracted.

    Every backward must descend from forwards on the last rank that are part of a pass over all ranks, in rank order.
    Otherwise the result is zero.
    """
    first = [int(head[graph.rank == r].min(initial=0)) for r in range(graph.num_ranks)]
    links = _Links(graph.predecessor_start, graph.predecessor, graph.predecessor_delay_ns)
    return _chain(graph, graph.kind == FORWARD, links, least, most, first)


def _cool_down(graph: TaskGraph, least: IntArray, most: IntArray, tail: IntArray) -> list[int]:
    """Mirror image of `_warm_up` in time; zero with split backwards, whose W may run in the cool-down.

    The two windows of a rank do not overlap. Every forward ends before the last backward pass begins on the last rank,
    so before it ends on this rank; and the first window ends at a forward's start.
    """
    if (graph.kind >= INPUT_GRADIENT).any():
        return [0] * graph.num_ranks
    last = [int(tail[graph.rank == r].min(initial=0)) for r in range(graph.num_ranks)]
    links = _Links(graph.successor_start, graph.successor, graph.successor_delay_ns)
    return _chain(graph, graph.kind != FORWARD, links, least, most, last)


class _Links(NamedTuple):
    """Compressed rows by task: its predecessors (successors in reversed time) and the delays from them."""

    rows: IntArray
    neighbor: IntArray
    delay: IntArray


def _chain(
    graph: TaskGraph, inside: BoolArray, links: _Links, least: IntArray, most: IntArray, floor: list[int]
) -> list[int]:
    """Return the idle time by rank that passes of the ``inside`` tasks cause; ``links`` are their predecessors.

    ``floor`` is a lower bound of the idle time of every rank, known from elsewhere.
    """
    none = [0] * graph.num_ranks
    turning = _turning(graph, inside, links.rows, links.neighbor)
    if not turning:
        return none
    # slot[s, r]: the inside task of segment s on rank r.
    slot = np.full((graph.num_passes, graph.num_ranks), NO_TASK, np.int64)
    tasks = np.flatnonzero(inside)
    slot[graph.pass_id[tasks], graph.rank[tasks]] = tasks
    linked = _delays_along_segments(graph, tasks, *links)
    passes = slot[graph.pass_id[np.array(turning)]]
    if (passes == NO_TASK).any() or (linked[passes[:, 1:]] < 0).any():
        return none
    idle = np.full(len(passes), floor[0], np.int64)
    answer = [floor[0]]
    for rank in range(1, graph.num_ranks):
        here = tasks[graph.rank[tasks] == rank]
        has = linked[here] >= 0
        matched = here[has]
        before = slot[graph.pass_id[matched], rank - 1]
        excess = int(np.maximum(0, most[matched] - least[before]).sum() + most[here[~has]].sum())
        wire = int(linked[matched].min())
        idle = np.maximum(idle + least[passes[:, rank - 1]] + wire - excess, floor[rank])
        answer.append(int(idle.min()))
    return answer


def _turning(graph: TaskGraph, inside: BoolArray, rows: IntArray, neighbor: IntArray) -> list[int]:
    """Return inside tasks on the last rank such that every outside task descends from one of them; empty if none.

    Only outside tasks without an outside predecessor are checked: each needs such a task as direct predecessor.
    """
    target = np.repeat(np.arange(graph.num_tasks), np.diff(rows))
    outside_before = np.zeros(graph.num_tasks, bool)
    outside_before[target[~inside[neighbor]]] = True
    roots = set(np.flatnonzero(~inside & ~outside_before).tolist())
    crossing = ~inside[target] & inside[neighbor] & (graph.rank[neighbor] == graph.num_ranks - 1)
    found: dict[int, int] = {}
    for root, task in zip(target[crossing].tolist(), neighbor[crossing].tolist(), strict=True):
        # Prefer the root's own pair, which serves only this root, so that the set stays small.
        if root in roots and (root not in found or graph.pair[root] == graph.pair[task]):
            found[root] = task
    return sorted(set(found.values())) if roots and len(found) == len(roots) else []


def _delays_along_segments(
    graph: TaskGraph, tasks: IntArray, rows: IntArray, neighbor: IntArray, delay: IntArray
) -> IntArray:
    """Return each task's delay from its own segment's task on the previous rank; -1 without such an edge."""
    target = np.repeat(np.arange(graph.num_tasks), np.diff(rows))
    same = (graph.pass_id[target] == graph.pass_id[neighbor]) & (graph.rank[target] == graph.rank[neighbor] + 1)
    linked = np.full(graph.num_tasks, -1, np.int64)
    np.maximum.at(linked, target[same], delay[same])
    kept = np.full(graph.num_tasks, -1, np.int64)
    kept[tasks] = linked[tasks]
    return kept


def assignable_bound(assignable: Assignable) -> LowerBound:
    """Return a lower bound under every assignment and every choice of candidates.

    - ``critical path``: the longest path without delays to or from free pairs.
    - ``warm-up + work + cool-down``: on some rank, of the pairs that are fixed to it.
    - ``all work``: the work of all ranks, spread evenly or by their speeds.

    Without free pairs, this is `lower_bound`.
    """
    if not assignable.free.any():
        return lower_bound(assignable.graph)
    graph = assignable.relaxed
    options = pair_options(graph)
    duration, _ = extreme_durations(graph, options)
    head, tail = longest_paths(graph, duration)
    work = (options.forward_ns + options.backward_ns + options.weight_ns).min(axis=1)
    found = [
        LowerBound(int((head + duration + tail).max()), "critical path"),
        LowerBound(_all_work(assignable, work), "all work"),
    ]
    fixed = ~assignable.free
    for rank in range(graph.num_ranks):
        pairs = fixed & (assignable.assignment == rank)
        tasks = np.flatnonzero(pairs[graph.pair])
        if tasks.size:
            ends = int(head[tasks].min()) + int(tail[tasks].min())
            found.append(LowerBound(ends + int(work[pairs].sum()), "warm-up + work + cool-down"))
    return max(found, key=lambda bound: bound.ns)


def _all_work(assignable: Assignable, work: IntArray) -> int:
    """Return the time for all work if it is divided by the speeds of the ranks; ``work`` has shape (num_pairs,)."""
    graph, slowness = assignable.graph, assignable.slowness
    if not assignable.options:
        return -(-int(work.sum()) // graph.num_ranks)
    # Weigh work by the speed of its rank. Each pair weighs least on the slowest rank, since some work (copies to the
    # host) takes equally long on all ranks.
    slowest = int(slowness.argmax())
    options = pair_options(assignable.with_speed_of(slowest))
    weighed = (options.forward_ns + options.backward_ns + options.weight_ns).min(axis=1)
    rank = np.where(assignable.free, slowest, assignable.assignment)
    # Durations are rounded, by less than 1 ns per task.
    total = float((weighed / slowness[rank]).sum()) - graph.num_tasks / float(slowness.min())
    return max(0, int(total / float((1 / slowness).sum())))
