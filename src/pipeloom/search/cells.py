"""The task graph packed for list scheduling, so that the data of one step is contiguous.

A *cell* is the place of a task in the packed arrays. The cells of a segment are sorted by rank, so a task has cell
``base[pass_id] + rank``, and neighbors in a chain share a cache line. A *link* encodes an edge as one number: the
place at which the successor queues, its segment, and its join number. A *join* is a task with several predecessors.
"""

from __future__ import annotations

import numpy as np

from pipeloom.errors import InputError
from pipeloom.taskgraph import IntArray

PLACE_BITS, JOIN_BITS, SEGMENT_BITS = 16, 24, 23
"""Widths of the fields of a link, lowest first. A place is four times the rank plus the class. Join 0 means no join."""


def pack(
    pass_id: IntArray,
    place: IntArray,
    duration: IntArray,
    first_successor: IntArray,
    successor: IntArray,
    waiting: IntArray,
    num_passes: int,
) -> tuple[dict[str, IntArray], IntArray]:
    """Pack tasks; return fields of `pipeloom.search.packed.PackedGraph` and the cell of every task.

    ``first_successor`` and ``successor`` are rows ``(task, delay)`` of every task, as there.
    """
    num_tasks = len(pass_id)
    rank = place >> 2
    if int(place.max()) >= 1 << PLACE_BITS or num_passes >= 1 << SEGMENT_BITS or num_tasks >= 1 << JOIN_BITS:
        raise InputError(
            "instance", f"{num_tasks} tasks on {int(rank.max()) + 1} ranks are more than the search can number"
        )
    lowest = np.full(num_passes, 1 << PLACE_BITS, np.int64)
    np.minimum.at(lowest, pass_id, rank)
    highest = np.full(num_passes, -1, np.int64)
    np.maximum.at(highest, pass_id, rank)
    width = np.maximum(highest - lowest + 1, 0)
    base = np.cumsum(width) - width - np.where(width > 0, lowest, 0)
    cell = base[pass_id] + rank
    number = np.full(int(width.sum()), -1, np.int64)
    number[cell] = np.arange(num_tasks)

    joins = np.flatnonzero(waiting > 1)
    join_of = np.zeros(num_tasks, np.int64)
    join_of[joins] = 1 + np.arange(len(joins))
    link_to = pass_id << (PLACE_BITS + JOIN_BITS) | join_of << PLACE_BITS | place

    count = np.diff(first_successor)
    source = np.repeat(np.arange(num_tasks), count)
    long = count > 1
    long[source[successor[:, 1] > 0]] = True
    link = np.full(num_tasks, -1, np.int64)
    short = ~long & (count == 1)
    link[short] = link_to[successor[first_successor[:-1][short], 0]]
    # Each list has one entry per successor and one for its end.
    length = np.where(long, count + 1, 0)
    row = 1 + np.cumsum(length) - length
    link[long] = -2 - row[long]
    extra = np.full((int(length.sum()) + 1, 2), -1, np.int64)
    inside = long[source]
    where = (row[source] + np.arange(len(source)) - first_successor[source])[inside]
    extra[where, 0] = link_to[successor[inside, 0]]
    extra[where, 1] = successor[inside, 1]

    record = np.zeros((len(number), 2), np.int64)
    record[cell, 0], record[cell, 1] = duration, link
    fields = {
        "base": base.astype(np.int32),
        "number": number,
        "record": record.ravel(),
        "extra": extra.ravel(),
        "join_waiting": waiting[joins],
        "source_link": link_to[waiting == 0],
    }
    return fields, cell
