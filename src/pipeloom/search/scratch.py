"""What list scheduling writes: one set of arrays per thread, made once per problem."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.search.packed import PLACE, PackedGraph

Array = npt.NDArray[Any]

NODE_SHIFT = 5
"""Logarithm of the numbers that ``Scratch.node`` has for a rank."""


RANK_BITS, WORD_SHIFT, GROUP_SHIFT, NUM_URGENT, SECOND, THIRD = range(6)
"""Entries of ``Scratch.sizes``."""


class Scratch(NamedTuple):
    """Arrays that list scheduling writes; see `make_scratch`. All int64 unless said otherwise.

    Attributes
    ----------
    at : array of int32
        ``PackedGraph.base`` of the segment at every position, class after class.
    position : array of int32, shape (num_segments,)
        Position of every segment in its class.
    sizes : array, shape (6,)
        Bits of a rank in ``key``; logarithms of the words of a queue and of the words behind one bit of its summary;
        bits of a backward queue's summary that are urgent; where the second and the third class begin in ``at``.
    bits : array
        Ready queues: per place (four times the rank plus the class) one bit a position.
    node : array
        Per rank its clock, queues' summaries, expected tasks; see `pipeloom.search.kernels.queues`.
    late : array, shape (num_ranks, most tasks of a rank, 2)
        Tasks expected beyond the first of each class: time, and position and place.
    key : array
        Per rank when it could start something next, and the rank in the lowest bits; padded to a multiple of 4.
    joins : array
        Per join the predecessors left and the time it is ready, from 1 on.
    run : array of int32, shape (num_tasks,)
        Cells in the order in which they were scheduled.
    sequence : array, shape (num_tasks,)
        The same as tasks, once list scheduling is complete.
    ready : array, shape (num_cells,)
        When a task was ready; -1 once it is scheduled. Only where memory is limited, as is the rest.
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
    """Return arrays for list scheduling of one problem; one set per thread."""
    num_tasks, num_passes = len(packed.waiting), len(packed.base)
    num_ranks, num_components = len(packed.capacity), len(packed.demand)
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
        ready=ints(len(packed.number)),
        free=ints(num_ranks),
        available=ints(num_ranks),
        demand=ints(num_components, num_ranks),
        allocated=ints(num_components, num_ranks),
        component_left=ints(num_components),
        active=ints(num_components),
    )
