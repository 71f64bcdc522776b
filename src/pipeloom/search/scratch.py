"""Arrays that list scheduling writes. Each thread has one set per problem."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.search.kernels.banker import bank_arrays
from pipeloom.search.packed import PLACE, PackedGraph

Array = npt.NDArray[Any]

NODE_SHIFT = 5
"""Base-2 logarithm of the number of entries that ``Scratch.node`` has for each rank."""

RANK_BITS, WORD_SHIFT, GROUP_SHIFT, NUM_URGENT, SECOND, THIRD = range(6)
"""Entries of ``Scratch.sizes``."""


class Scratch(NamedTuple):
    """Arrays that list scheduling writes, int64 unless declared otherwise; see `make_scratch`.

    Attributes
    ----------
    at : array of int32
        ``PackedGraph.base`` of the segment at every position, class after class.
    position : array of int32, shape (num_segments,)
        Position of every segment in its class.
    sizes : array, shape (6,)
        In this order: the number of bits of a rank in ``key``; the base-2 logarithms of the number of words of a queue
        and of the number of words behind one bit of its summary; the number of urgent bits in the summary of a backward
        queue; and the starts of the second and third class in ``at``.
    bits : array
        Ready queues. Each place (four times the rank plus the class) has one bit per position.
    node : array
        Clock, queue summaries and expected tasks of each rank; see `pipeloom.search.kernels.queues`.
    late : array, shape (num_ranks, largest number of tasks of a rank, 2)
        Expected tasks after the first of each class: the time, and the position and place as one number.
    key : array
        Earliest next start of each rank, with the rank in the lowest bits. Padded to a multiple of 4.
    joins : array
        Number of remaining predecessors and ready time of each join, from 1 on.
    run : array of int32, shape (num_tasks,)
        Cells in the order in which they were scheduled.
    sequence : array, shape (num_tasks,)
        The same order as tasks, once list scheduling is complete.
    ready : array, shape (num_cells,)
        Time at which a task became ready; -1 once it is scheduled. Used only if memory is limited, as are the fields
        below.
    """

    at: Array
    position: Array
    sizes: Array
    bits: Array
    node: Array
    late: Array
    key: Array
    joins: Array
    run: Array
    sequence: Array
    ready: Array
    free: Array
    available: Array
    demand: Array
    allocated: Array
    component_left: Array
    active: Array


def make_scratch(packed: PackedGraph) -> Scratch:
    """Return the arrays of one thread for list scheduling of one problem."""
    num_tasks, num_passes = len(packed.waiting), len(packed.base)
    num_ranks = len(packed.capacity)
    per_rank = int(np.bincount(packed.task[:-1, PLACE] >> 2, minlength=num_ranks).max())
    widest = int(np.diff(packed.class_start).max())
    word_shift = 0
    while 1 << word_shift < (widest + 63) // 64 + (1 << max(0, word_shift - 6)):
        word_shift += 1
    group_shift = max(0, word_shift - 6)
    second = int(packed.class_start[1])
    third = int(packed.class_start[2]) + (64 << group_shift)

    def ints(*shape: int) -> Array:
        return np.zeros(shape, np.int64)

    return Scratch(
        at=np.zeros(num_passes + (64 << group_shift), np.int32),
        position=np.zeros(num_passes, np.int32),
        sizes=np.array([(num_ranks - 1).bit_length(), word_shift, group_shift, 64, second, third], np.int64),
        bits=ints(4 * num_ranks << word_shift),
        node=ints(num_ranks << NODE_SHIFT),
        late=ints(num_ranks, per_rank, 2),
        key=ints((num_ranks + 3) // 4 * 4),
        joins=ints(2 * len(packed.join_waiting) + 2),
        run=np.zeros(num_tasks, np.int32),
        sequence=ints(num_tasks),
        **bank_arrays(packed),
    )
