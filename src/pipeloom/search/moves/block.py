"""Moves to the ends of critical blocks, what they see, and the parts of their estimates."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from pipeloom.compiled import callee, inlined
from pipeloom.search.kernels.blocks import Blocks, entry, length_of, rank_of
from pipeloom.search.kernels.codes import DEADLOCK
from pipeloom.search.moves.move import Move
from pipeloom.search.packed import FIRST_SUCCESSOR, NET, PEAK


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
def run_next(blocks: Blocks, number: int, end: int, held: int) -> Any:
    """Run a task on trial from ``end`` on, with ``held`` bytes on its rank.

    Return its end and the bytes held after it, or -1 and -1 if memory forbids it.
    """
    if held + entry(blocks, number, PEAK) > blocks.capacity[rank_of(blocks, number)]:
        return -1, -1
    blocks.trial[number] = max(end, blocks.released[number])
    return blocks.trial[number] + length_of(blocks, number), held + entry(blocks, number, NET)


class MoveBehindBlock(BlockMove):
    """Move a task behind the last task of its block."""

    name = "move behind a block"

    @staticmethod
    @callee
    def propose(block: Block, distance: int) -> tuple[int, int]:
        """Return the place of the task ``distance`` places before the last one, and its goal; -1 for no move."""
        pair = block.last == block.first + 1
        if not block.may_end and not (block.may_begin and pair):
            return -1, -1
        return block.last - distance, block.last

    @staticmethod
    @callee
    def evaluate(blocks: Blocks, source: int, goal: int, most: int) -> int:
        """Return the estimated makespan if the task at ``source`` moves behind the task at ``goal``.

        The estimate is at most ``most`` + 1. Return `DEADLOCK` if memory forbids the move, or if a successor of the
        task may run before the task at ``goal``. If ``most`` is not `NEVER`, the tasks between must run without a gap.
        """
        order = blocks.order
        moved, last = order[source], order[goal]
        end = end_before(blocks, source)
        after = max(blocks.left[moved], path_behind(blocks, goal))
        # The moved task ends no earlier than if the others ran without a gap.
        whole = blocks.start[last] + length_of(blocks, last) - blocks.start[moved]
        if max(end, blocks.released[order[source + 1]]) + whole + after > most:
            return most + 1
        for e in range(entry(blocks, moved, FIRST_SUCCESSOR), entry(blocks, moved + 1, FIRST_SUCCESSOR)):
            other = blocks.successor[2 * e]
            if other == last or blocks.start[other] + length_of(blocks, other) <= blocks.start[last]:
                return DEADLOCK
        held = blocks.level[source]
        for k in range(source + 1, goal + 1):
            end, held = run_next(blocks, order[k], end, held)
            if end < 0:
                return DEADLOCK
        end, held = run_next(blocks, moved, end, held)
        if end < 0:
            return DEADLOCK
        longest = end + after
        after += length_of(blocks, moved)
        k = goal
        while k > source and longest <= most:
            number = order[k]
            after = max(blocks.left[number], after) + length_of(blocks, number)
            longest = max(longest, blocks.trial[number] + after)
            k -= 1
        return int(min(longest, most + 1))


class MoveBeforeBlock(BlockMove):
    """Move a task before the first task of its block."""

    name = "move before a block"

    @staticmethod
    @callee
    def propose(block: Block, distance: int) -> tuple[int, int]:
        """Return the place of the task ``distance`` places behind the first one, and its goal; -1 for no move."""
        # In a block of two tasks, this is the same as `MoveBehindBlock`.
        if not block.may_begin or block.last == block.first + 1:
            return -1, -1
        return block.first + distance, block.first

    @staticmethod
    @callee
    def evaluate(blocks: Blocks, source: int, goal: int, most: int) -> int:
        """Return the estimated makespan if the task at ``source`` moves before the task at ``goal``.

        Limits and results are those of `MoveBehindBlock.evaluate`, with predecessors instead of successors.
        """
        order = blocks.order
        first, moved = order[goal], order[source]
        end, after = end_before(blocks, goal), path_behind(blocks, source)
        whole = blocks.start[moved] + length_of(blocks, moved) - blocks.start[first]
        if max(end, blocks.released[moved]) + whole + max(blocks.left[order[source - 1]], after) > most:
            return most + 1
        for e in range(blocks.before_start[moved], blocks.before_start[moved + 1]):
            other = blocks.before[e]
            if other == first or blocks.start[first] + length_of(blocks, first) <= blocks.start[other]:
                return DEADLOCK
        end, held = run_next(blocks, moved, end, blocks.level[goal])
        if end < 0:
            return DEADLOCK
        for k in range(goal, source):
            end, held = run_next(blocks, order[k], end, held)
            if end < 0:
                return DEADLOCK
        longest = 0
        k = source - 1
        while k >= goal and longest <= most:
            number = order[k]
            after = max(blocks.left[number], after) + length_of(blocks, number)
            longest = max(longest, blocks.trial[number] + after)
            k -= 1
        after = max(blocks.left[moved], after) + length_of(blocks, moved)
        return int(min(max(longest, blocks.trial[moved] + after), most + 1))
