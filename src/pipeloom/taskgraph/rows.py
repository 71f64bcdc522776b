"""Edges as compressed rows: predecessors and successors of every task."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeloom.taskgraph.columns import IntArray

_NO_TASK = -1


class Links(NamedTuple):
    """Successors or predecessors of tasks in compressed rows, with the delays of the edges."""

    start: IntArray
    other: IntArray
    delay: IntArray


def close_edges(
    source: IntArray, target: IntArray, delay: IntArray, forward: IntArray, backward: IntArray, weight: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Add the implied edges: F before its backward, I before W."""
    has_backward, has_weight = backward != _NO_TASK, weight != _NO_TASK
    extra_source = np.concatenate([forward[has_backward], backward[has_weight]])
    extra_target = np.concatenate([backward[has_backward], weight[has_weight]])
    return (
        np.concatenate([source, extra_source]),
        np.concatenate([target, extra_target]),
        np.concatenate([delay, np.zeros(len(extra_source), np.int64)]),
    )


def adjacency(
    edges: tuple[IntArray, IntArray, IntArray], pairs: tuple[IntArray, IntArray, IntArray], num_tasks: int
) -> dict[str, Any]:
    """Return the predecessors and successors of all tasks, implied edges included, as fields of `TaskGraph`.

    ``edges`` are source, target and delay of every edge, and ``pairs`` are F, B or I, and W of every pair.
    """
    source, target, delay = close_edges(*edges, *pairs)
    fields: dict[str, Any] = {}
    for name, row, value in (("predecessor", target, source), ("successor", source, target)):
        columns = compressed(row, value, delay, num_tasks)
        fields |= dict(zip((f"{name}_start", name, f"{name}_delay_ns"), columns, strict=True))
    return fields


def compressed(row: IntArray, value: IntArray, delay: IntArray, num_rows: int) -> Links:
    """Sort values with their delays by row."""
    order = np.argsort(row, kind="stable")
    return Links(row_start(row, num_rows), value[order], delay[order])


def row_start(row: IntArray, num_rows: int) -> IntArray:
    """Return the start of each compressed row, given the row of every value."""
    start = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=num_rows), out=start[1:])
    return start
