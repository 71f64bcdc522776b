"""A simple pipeline schedule of the emulator: backward first, with a limited number of microbatches in flight.

It is used if no schedule is given (`emulate`, `sweep`). It is list scheduling similar to 1F1B. The planner's searches
are in `pipeloom.search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeloom.emulator.rules import IntArray
from pipeloom.emulator.schedule_kernels import TaskArrays, run
from pipeloom.totals import check_total, summable


@dataclass(slots=True)
class PipelineTask:
    """Forward or backward of a stage on one part of a microbatch."""

    rank: int
    microbatch: int
    backward: bool
    duration_ps: int
    held_bytes: int
    """Bytes allocated by a forward and freed by its backward."""
    before: list[tuple[int, int]] = field(default_factory=list)
    """Tasks to wait for, and picoseconds of the transfer of their results."""


def task_arrays(tasks: Sequence[PipelineTask]) -> TaskArrays:
    """Convert tasks to arrays for `list_schedule`."""
    count = len(tasks)
    number, microbatch = np.unique([t.microbatch for t in tasks], return_inverse=True)
    forward = np.array([not t.backward for t in tasks])
    place = np.empty(count, np.int64)
    place[np.lexsort((np.arange(count), microbatch, forward))] = np.arange(count)
    waiting = np.array([len(t.before) for t in tasks], np.int64)
    source = np.array([s for t in tasks for s, _ in t.before], np.int64)
    delay = np.array([d for t in tasks for _, d in t.before], np.int64)
    by_source = np.argsort(source, kind="stable")
    free = np.flatnonzero(waiting == 0)
    free = free[np.argsort(microbatch[free], kind="stable")]
    return TaskArrays(
        np.array([t.rank for t in tasks], np.int64),
        microbatch.astype(np.int64),
        place,
        waiting,
        _rows(microbatch[free], len(number)),
        free.astype(np.int64),
        _rows(source, count),
        np.repeat(np.arange(count), waiting)[by_source],
        delay[by_source],
    )


def _rows(owner: IntArray, count: int) -> IntArray:
    """Return the starts of compressed rows from the owners of their entries."""
    out = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(owner, minlength=count), out=out[1:])
    return out


def list_schedule(
    tasks: Sequence[PipelineTask], num_ranks: int, in_flight: int, arrays: TaskArrays | None = None
) -> tuple[list[int], list[int]]:
    """Order tasks greedily.

    A free rank runs a ready backward of the earliest microbatch, or else a ready forward of the earliest one. A
    microbatch enters if fewer than ``in_flight`` are between the start of their first and the end of their last task.
    This limits memory and cannot deadlock. ``arrays`` is the result of `task_arrays`, if it is known already.

    Returns
    -------
    order, start_ps
        Tasks by start time (topological), and the start of each task.
    """
    if not tasks:
        return [], []
    a = task_arrays(tasks) if arrays is None else arrays
    duration = summable("tasks", [t.duration_ps for t in tasks], "ps")
    check_total("tasks and messages", float(duration.sum()) + a.delay_ps.sum(dtype=float), "ps")
    order, start = run(a, duration, num_ranks, in_flight)
    return order.tolist(), start.tolist()
