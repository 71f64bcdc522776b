"""Moves to the ends of critical blocks, what they see, and the parts of their estimates."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from pipeloom.compiled import inlined
from pipeloom.search.kernels.blocks import Blocks, entry, length_of, rank_of
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

    ``evaluate`` is a compiled function that estimates the makespan after the move.
    """

    weight = 0
    evaluate: ClassVar[Any]


@inlined
def end_before(blocks: Blocks, place: int) -> Any:
    """Return the end of the previous task of the rank, or 0 if there is none."""
    if place == blocks.row[rank_of(blocks, blocks.order[place])]:
        return 0
    number = blocks.order[place - 1]
    return blocks.start[number] + length_of(blocks, number)


@inlined
def path_behind(blocks: Blocks, place: int) -> Any:
    """Return the longest path that begins with the next task of the rank, or 0 if there is none."""
    if place + 1 == blocks.row[rank_of(blocks, blocks.order[place]) + 1]:
        return 0
    number = blocks.order[place + 1]
    return length_of(blocks, number) + blocks.tail[number]


@inlined
def may_precede(blocks: Blocks, first: int, second: int) -> Any:
    """Return whether a path may lead from one task to another."""
    # Times alone cannot tell if tasks without duration start together.
    ends = blocks.start[first] + length_of(blocks, first)
    return ends <= blocks.start[second] and blocks.turn[first] < blocks.turn[second]


@inlined
def run_next(blocks: Blocks, number: int, end: int, held: int) -> Any:
    """Run a task on trial from ``end`` on, with ``held`` bytes on its rank.

    Return its end and the bytes held after it, or -1 and -1 if memory forbids it.
    """
    if held + entry(blocks, number, PEAK) > blocks.capacity[rank_of(blocks, number)]:
        return -1, -1
    blocks.trial[number] = max(end, blocks.released[number])
    return blocks.trial[number] + length_of(blocks, number), held + entry(blocks, number, NET)
