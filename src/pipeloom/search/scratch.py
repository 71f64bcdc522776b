"""Arrays that list scheduling writes. Each thread has one set per problem."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.compiled import Array
from pipeloom.search.kernels.banker import Bank, make_bank
from pipeloom.search.kernels.codes import NEVER
from pipeloom.search.packed import PLACE, PackedGraph

NODE_SHIFT = 5
"""Base-2 logarithm of the number of entries that ``Scratch.node`` has for each rank."""


class Scratch(NamedTuple):
    """Arrays that list scheduling writes, int64 unless declared otherwise; see `make_scratch`.

    Kernels read `pointers` to them. ``record``, ``extra`` and ``base`` are arrays of `PackedGraph`.

    Attributes
    ----------
    at : array of int32
        ``PackedGraph.base`` of the segment at every position, class after class.
    position : array of int32, shape (num_segments,)
        Position of every segment in its class.
    urgent : array, shape (1,)
        Mask of the part of the summary of a backward queue that competes with forwards.
    bits : array
        Ready queues. Each place (four times the rank plus the class) has one bit per position.
    node : array
        Clock, queue summaries and expected tasks of each rank; see `pipeloom.search.kernels.queues`.
    late : array, shape (num_ranks, largest number of tasks of a rank, 2)
        Expected tasks after the first of each class: the time, and the position and place as one number.
    key : array
        Earliest next start of each rank, with the rank in the lowest ``rank_bits`` bits. Padded to a multiple of 4.
    joins : array
        Number of remaining predecessors and ready time of each join, from 1 on.
    run : array of int32, shape (num_tasks,)
        Cells in the order in which they were scheduled.
    sequence : array, shape (num_tasks,)
        The same order as tasks, once list scheduling is complete.
    ready : array, shape (num_cells,)
        ``bank.ready``, used only if memory is limited, as ``bank``.
    word_shift, group_shift : int
        Base-2 logarithms of the number of words of a queue and of the number of words behind one bit of its summary.
    second, third : int
        Starts of the second and third class in ``at``.
    never : int
        Later than any time. It can still be packed with a rank into a key.
    """

    at: Array
    position: Array
    urgent: Array
    bits: Array
    node: Array
    late: Array
    key: Array
    joins: Array
    run: Array
    sequence: Array
    ready: Array
    record: Array
    extra: Array
    base: Array
    bank: Bank
    num_keys: int
    rank_bits: int
    word_shift: int
    group_shift: int
    second: int
    third: int
    never: int
    has_weights: bool


def make_scratch(packed: PackedGraph) -> Scratch:
    """Return the arrays of one thread for list scheduling of one problem."""
    num_tasks, num_passes = len(packed.waiting), len(packed.base)
    num_ranks = len(packed.capacity)
    per_rank = int(np.bincount(packed.task[:-1, PLACE] >> 2, minlength=num_ranks).max())
    forwards, backwards, weights = np.diff(packed.class_start).tolist()
    widest = max(forwards, backwards, weights)
    word_shift = 0
    while 1 << word_shift < (widest + 63) // 64 + (1 << max(0, word_shift - 6)):
        word_shift += 1
    group_shift = max(0, word_shift - 6)
    rank_bits, num_keys = (num_ranks - 1).bit_length(), (num_ranks + 3) // 4 * 4
    bank = make_bank(packed)

    def ints(*shape: int) -> Array:
        return np.zeros(shape, np.int64)

    return Scratch(
        at=np.zeros(num_passes + (64 << group_shift), np.int32),
        position=np.zeros(num_passes, np.int32),
        urgent=np.full(1, -1, np.int64),
        bits=ints(4 * num_ranks << word_shift),
        node=ints(num_ranks << NODE_SHIFT),
        late=ints(num_ranks, per_rank, 2),
        key=ints(num_keys),
        joins=ints(2 * len(packed.join_waiting) + 2),
        run=np.zeros(num_tasks, np.int32),
        sequence=ints(num_tasks),
        ready=bank.ready,
        record=packed.record,
        extra=packed.extra,
        base=packed.base,
        bank=bank,
        num_keys=num_keys,
        rank_bits=rank_bits,
        word_shift=word_shift,
        group_shift=group_shift,
        second=forwards,
        third=forwards + backwards + (64 << group_shift),
        never=NEVER >> rank_bits,
        has_weights=weights > 0,
    )
