"""Checkpoints of simulations: a changed graph is simulated from its first changed task on (PipeWeaver §4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError, PlanError
from pipeloom.lazy import lazy_module
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline.schedule import Schedule, Timeline
from pipeloom.timeline.simulate import cycle_text, flatten_order, timeline_of

if TYPE_CHECKING:
    from pipeloom.timeline import kernels
else:
    kernels = lazy_module("pipeloom.timeline.kernels")


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A simulated schedule, from which `resume` continues.

    Attributes
    ----------
    graph : TaskGraph
        The graph with the chosen candidates.
    sequence : array, shape (num_tasks,)
        All tasks in an order that respects the edges and the order of every rank.
    before : array, shape (num_tasks,)
        Previous task on the rank; -1 for the first.
    num_reused : int
        Number of tasks whose times come from an earlier checkpoint.
    """

    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    sequence: IntArray
    before: IntArray
    num_reused: int = 0


def checkpoint(graph: TaskGraph, schedule: Schedule) -> Checkpoint:
    """Simulate a schedule as `pipeloom.timeline.simulate` does, and keep what `resume` needs."""
    chosen = graph.with_candidates(schedule.candidate)
    flat, rows = flatten_order(graph, schedule)
    empty = np.zeros(graph.num_tasks, np.int64)
    return _run(chosen, schedule, (flat, rows), 0, (empty, empty, flat))


def resume(saved: Checkpoint, graph: TaskGraph, schedule: Schedule | None = None) -> Checkpoint:
    """Simulate a graph that differs from a checkpoint's in durations, edges or bytes.

    Tasks that come before the first changed one in the checkpoint's sequence keep their times. A task has changed if
    its duration, one of its edges, or the previous task on its rank is another one.

    Parameters
    ----------
    saved : Checkpoint
        It is not changed.
    graph : TaskGraph
        The changed graph, with the same tasks on the same ranks.
    schedule : Schedule or None
        Another order; None: that of the checkpoint.

    Raises
    ------
    InputError
        The graph has other tasks.
    PlanError
        The order deadlocks with the new edges; the message gives the cycle of tasks.
    """
    schedule = saved.schedule if schedule is None else schedule
    chosen, old = graph.with_candidates(schedule.candidate), saved.graph
    if not np.array_equal(chosen.rank, old.rank):
        raise InputError("graph", "has other tasks or ranks than the checkpoint", "simulate it from the start")
    flat, rows = flatten_order(graph, schedule)
    changed = (chosen.duration_ns != old.duration_ns) | _other_edges(old, chosen)
    changed |= _neighbors(flat, rows)[0] != saved.before
    place = np.flatnonzero(changed[saved.sequence])
    first = int(place[0]) if len(place) else graph.num_tasks
    known = (saved.timeline.start_ns, saved.timeline.end_ns, saved.sequence)
    return _run(chosen, schedule, (flat, rows), first, known)


def _run(
    graph: TaskGraph,
    schedule: Schedule,
    order: tuple[IntArray, IntArray],
    first: int,
    known: tuple[IntArray, IntArray, IntArray],
) -> Checkpoint:
    before, after = _neighbors(*order)
    start, end, queue = (column.copy() for column in known)
    run = kernels.Run(start, end, queue, np.zeros(graph.num_tasks, np.int64), after)
    rest = queue[first:].copy()
    done = kernels.resume(rest, before, graph.predecessors, graph.duration_ns, graph.successors, run)
    if done < graph.num_tasks:
        raise PlanError("order deadlocks: " + cycle_text(graph, *order, run.waiting))
    timeline = timeline_of(graph, *order, (run.start, run.end))
    return Checkpoint(graph, schedule, timeline, run.queue, before, first)


def _neighbors(flat: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Return the previous and the next task on the rank of every task, or -1."""
    before, after = np.full(len(flat), -1, np.int64), np.full(len(flat), -1, np.int64)
    inside = np.ones(len(flat), np.bool_)
    inside[rows[:-1][rows[:-1] < len(flat)]] = False
    here = np.flatnonzero(inside)
    before[flat[here]], after[flat[here - 1]] = flat[here - 1], flat[here]
    return before, after


def _other_edges(old: TaskGraph, new: TaskGraph) -> npt.NDArray[np.bool_]:
    """Return which tasks have other predecessors or delays."""
    changed = np.zeros(new.num_tasks, np.bool_)
    target = np.repeat(np.arange(new.num_tasks), np.diff(new.predecessor_start))
    if np.array_equal(old.predecessor_start, new.predecessor_start) and np.array_equal(
        old.predecessor, new.predecessor
    ):
        changed[target[old.predecessor_delay_ns != new.predecessor_delay_ns]] = True
        return changed
    edges = [
        np.unique(np.stack([np.repeat(np.arange(g.num_tasks), np.diff(g.predecessor_start)), *columns]), axis=1)
        for g in (old, new)
        for columns in [(g.predecessor, g.predecessor_delay_ns)]
    ]
    both, count = np.unique(np.concatenate(edges, axis=1), axis=1, return_counts=True)
    changed[both[0, count == 1]] = True
    return changed
