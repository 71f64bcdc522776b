"""Simulation of a schedule: earliest starts of a fixed order, and its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeloom.errors import InputError, PlanError
from pipeloom.lazy import lazy_module
from pipeloom.taskgraph import FORWARD, NO_TASK, IntArray, TaskGraph
from pipeloom.timeline.options import pair_options
from pipeloom.timeline.schedule import Schedule, Timeline

if TYPE_CHECKING:
    from pipeloom.timeline import kernels
else:
    kernels = lazy_module("pipeloom.timeline.kernels")


def simulate(graph: TaskGraph, schedule: Schedule) -> Timeline:
    """Simulate a schedule: every task starts as early as its rank and its predecessors allow.

    Parameters
    ----------
    graph : TaskGraph
        Tasks, durations, delays and bytes.
    schedule : Schedule
        If ``candidate`` is None, the graph's own durations and bytes apply.

    Returns
    -------
    Timeline
        Bytes held for no time do not count in ``peak_bytes``. Use `check` to check capacities.

    Raises
    ------
    InputError
        The order of some rank is not a permutation of its tasks.
    PlanError
        The order deadlocks; the message gives the cycle of tasks.
    """
    flat, rows = flatten_order(graph, schedule)
    chosen = graph.with_candidates(schedule.candidate)
    run, done = _retime(graph, flat, rows, chosen.duration_ns)
    if done < graph.num_tasks:
        raise PlanError("order deadlocks: " + cycle_text(graph, flat, rows, run.waiting))
    return timeline_of(chosen, flat, rows, (run.start, run.end))


def timeline_of(chosen: TaskGraph, flat: IntArray, rows: IntArray, times: tuple[IntArray, IntArray]) -> Timeline:
    """Return starts and ends with the peaks of an order, for a graph without candidates."""
    at_start, at_end = memory_changes(chosen)
    if ((chosen.duration_ns == 0) & ((at_start | at_end) != 0)).any():
        # Only the times show which changes coincide.
        timeline = Timeline(*times)
        peaks = [int(memory_curve(chosen, timeline, rank)[1].max()) for rank in range(chosen.num_ranks)]
        return Timeline(*times, np.array(peaks, np.int64))
    return Timeline(*times, _peaks(flat, rows, (at_start, at_end), chosen.static_bytes))


def peaks_with_instants(graph: TaskGraph, schedule: Schedule) -> IntArray:
    """Return the peak bytes of every rank, bytes held for no time included, shape (num_ranks,)."""
    chosen = graph.with_candidates(schedule.candidate)
    return _peaks(*flatten_order(graph, schedule), memory_changes(chosen), chosen.static_bytes)


def _peaks(flat: IntArray, rows: IntArray, changes: tuple[IntArray, IntArray], static: IntArray) -> IntArray:
    peak = np.empty(len(static), np.int64)
    kernels.peaks(flat, rows, *changes, static, peak)
    return peak


def flatten_order(graph: TaskGraph, schedule: Schedule) -> tuple[IntArray, IntArray]:
    """Return the concatenated orders and the start of each rank; raise if a task is not listed exactly once."""
    if len(schedule.order) != graph.num_ranks:
        raise InputError("order", f"has {len(schedule.order)} ranks, the instance {graph.num_ranks}")
    rows = np.zeros(graph.num_ranks + 1, np.int64)
    np.cumsum([len(tasks) for tasks in schedule.order], out=rows[1:])
    flat = np.concatenate([np.asarray(tasks, dtype=np.int64) for tasks in schedule.order])
    outside = np.flatnonzero((flat < 0) | (flat >= graph.num_tasks))
    if outside.size:
        raise InputError("order", f"task {flat[outside[0]]} is not in 0..{graph.num_tasks - 1}")
    times = np.bincount(flat, minlength=graph.num_tasks)
    if (times != 1).any():
        task = int(np.flatnonzero(times != 1)[0])
        word = "is missing" if times[task] == 0 else f"occurs {times[task]} times"
        raise InputError("order", f"{graph.describe(task)} {word}", "list every task exactly once")
    placed = np.repeat(np.arange(graph.num_ranks), np.diff(rows))
    wrong = np.flatnonzero(graph.rank[flat] != placed)
    if wrong.size:
        task = int(flat[wrong[0]])
        raise InputError("order", f"{graph.describe(task)} is listed on rank {placed[wrong[0]]}")
    return flat, rows


def running_order(graph: TaskGraph, schedule: Schedule) -> IntArray:
    """Return all tasks in one order that respects the edges and the order of every rank."""
    flat, rows = flatten_order(graph, schedule)
    return _retime(graph, flat, rows, graph.duration_ns)[0].queue


def _retime(graph: TaskGraph, flat: IntArray, rows: IntArray, duration: IntArray) -> tuple[kernels.Run, int]:
    """Simulate an order; return the run and the number of tasks that could run."""
    run = kernels.make_run(np.diff(graph.predecessor_start))
    return run, kernels.retime(flat, rows, duration, graph.successors, run)


def memory_changes(graph: TaskGraph) -> tuple[IntArray, IntArray]:
    """Return the bytes that every task adds to its rank when it starts, and adds or frees when it ends.

    An F without a backward frees its bytes at its end. Bytes of an edge are added at the end of its source and freed at
    the end of its target.

    Returns
    -------
    at_start, at_end : array, shape (num_tasks,)
    """
    at_start, at_end = _held_until_backward(graph, graph.activation_bytes)
    split = np.flatnonzero(graph.weight_of != NO_TASK)
    at_end[graph.backward_of[split]] += graph.weight_gradient_bytes[split]
    at_end[graph.weight_of[split]] -= graph.weight_gradient_bytes[split]
    np.add.at(at_end, graph.edge_source, graph.edge_bytes)
    np.subtract.at(at_end, graph.edge_target, graph.edge_bytes)
    return at_start, at_end


def _held_until_backward(graph: TaskGraph, size: IntArray) -> tuple[IntArray, IntArray]:
    """Return the changes at starts and ends of tasks if pairs hold ``size`` bytes from F to the end of B or I."""
    at_end = np.zeros(graph.num_tasks, np.int64)
    at_end[np.where(graph.backward_of == NO_TASK, graph.forward_of, graph.backward_of)] = -size
    return np.where(graph.kind == FORWARD, size[graph.pair], 0), at_end


def host_peaks(graph: TaskGraph, schedule: Schedule) -> IntArray:
    """Return the peak host bytes of every rank under the chosen candidates, shape (num_ranks,)."""
    nothing, held = np.zeros(graph.num_ranks, np.int64), _on_host(graph, schedule)
    if not held.any():
        return nothing
    return _peaks(*flatten_order(graph, schedule), _held_until_backward(graph, held), nothing)


def _on_host(graph: TaskGraph, schedule: Schedule) -> IntArray:
    """Return the host bytes of every pair."""
    if graph.candidates is None or schedule.candidate is None:
        return np.zeros(graph.num_pairs, np.int64)
    held: IntArray = pair_options(graph).host_bytes[np.arange(graph.num_pairs), schedule.candidate]
    return held


def within_limits(graph: TaskGraph, schedule: Schedule, timeline: Timeline) -> bool:
    """Return whether a simulated schedule fits into the memory of devices and host."""
    capacity, host = graph.capacity_under(_on_host(graph, schedule)), graph.host_capacity_bytes
    fits = capacity is None or bool((timeline.peak_bytes <= capacity).all())
    return fits and (host is None or bool((host_peaks(graph, schedule) <= host).all()))


def memory_curve(graph: TaskGraph, timeline: Timeline, rank: int) -> tuple[IntArray, IntArray]:
    """Return the memory of one rank over time, as steps.

    Parameters
    ----------
    graph : TaskGraph
        The graph with the chosen candidates (`TaskGraph.with_candidates`).
    timeline : Timeline
        Planned or measured times.

    Returns
    -------
    times_ns, bytes : array
        ``bytes[i]`` are in use from ``times_ns[i]`` until ``times_ns[i + 1]``; the first time is 0. Bytes that end at a
        time are freed before tasks that start then, so bytes held for no time do not appear.
    """
    mine = np.flatnonzero(graph.rank == rank)
    at_start, at_end = memory_changes(graph)
    moments = np.concatenate([[0], timeline.start_ns[mine], timeline.end_ns[mine]])
    changes = np.concatenate([[graph.static_bytes[rank]], at_start[mine], at_end[mine]])
    times, index = np.unique(moments, return_inverse=True)
    steps = np.zeros(len(times), np.int64)
    np.add.at(steps, index, changes)
    return times, np.cumsum(steps)


def cycle_text(graph: TaskGraph, flat: IntArray, rows: IntArray, waiting: IntArray) -> str:
    """Walk back from a task that never ran along predecessors that never ran, until a task repeats."""
    position = np.empty(graph.num_tasks, np.int64)
    position[flat] = np.arange(len(flat))
    first_of_rank = set(rows[:-1].tolist())
    task = int(np.flatnonzero(waiting > 0)[0])
    seen: dict[int, int] = {}
    path: list[int] = []
    while task not in seen:
        seen[task] = len(path)
        path.append(task)
        here = slice(graph.predecessor_start[task], graph.predecessor_start[task + 1])
        blockers = [int(p) for p in graph.predecessor[here] if waiting[p] > 0]
        if position[task] not in first_of_rank:
            blockers.append(int(flat[position[task] - 1]))
        task = next(b for b in blockers if waiting[b] > 0)
    words = [graph.describe(t) for t in path[seen[task] :]]
    shown = words if len(words) <= 6 else [*words[:3], f"{len(words) - 5} more", *words[-2:]]
    return " waits for ".join([*shown, "the first again"])
