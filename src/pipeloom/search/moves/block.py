"""What moves to the ends of critical blocks see, and the parts of their estimates."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from pipeloom.compiled import inlined
from pipeloom.search.kernels.blocks import BlockPointers, entry, length_of, rank_of
from pipeloom.search.moves.move import Move
from pipeloom.search.packed import NET, PEAK


class Block(NamedTuple):
    """A critical block: consecutive tasks of one rank, without a gap, on a longest path.

    Attributes
    ----------
    first, last : int
        Places of its first and last task in the order of the ranks.
    may_begin, may_end : bool
        Whether the schedule can become shorter if another task runs first, or last, in the block.
    """

    first: int
    last: int
    may_begin: bool
    may_end: bool


class BlockMove(Move):
    """A move of one task to an end of its block. All such moves are evaluated; none is drawn.

    Attributes
    ----------
    evaluate : callable
        Compiled function that estimates the makespan after the move.
    """

    weight = 0
    evaluate: ClassVar[Any]


@inlined
def end_before(pointers: BlockPointers, place: int) -> Any:
    """Return the end of the previous task of the rank, or 0 if there is none."""
    if place == pointers.row[rank_of(pointers, pointers.order[place])]:
        return 0
    number = pointers.order[place - 1]
    return pointers.start[number] + length_of(pointers, number)


@inlined
def path_behind(pointers: BlockPointers, place: int) -> Any:
    """Return the longest path that begins with the next task of the rank, or 0 if there is none."""
    if place + 1 == pointers.row[rank_of(pointers, pointers.order[place]) + 1]:
        return 0
    number = pointers.order[place + 1]
    return length_of(pointers, number) + pointers.tail[number]


@inlined
def run_next(pointers: BlockPointers, number: int, end: int, held: int) -> Any:
    """Run a task on trial from ``end`` on, with ``held`` bytes on its rank.

    Return its end and the bytes held after it, or -1 and -1 if memory forbids it.
    """
    if held + entry(pointers, number, PEAK) > pointers.capacity[rank_of(pointers, number)]:
        return -1, -1
    pointers.trial[number] = max(end, pointers.released[number])
    return pointers.trial[number] + length_of(pointers, number), held + entry(pointers, number, NET)
