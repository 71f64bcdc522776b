"""A task moves behind the last task of its critical block."""

from __future__ import annotations

from pipeloom.compiled import callee
from pipeloom.search.kernels.blocks import BlockPointers, entry, length_of, rank_of
from pipeloom.search.kernels.codes import DEADLOCK
from pipeloom.search.moves.block import Block
from pipeloom.search.moves.move import Move
from pipeloom.search.packed import FIRST_SUCCESSOR, NET, PEAK


class MoveBehindBlock(Move):
    """Move a task behind the last task of its block."""

    name = "move behind a block"
    weight = 0
    """All such moves are evaluated; none is drawn."""

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
    def evaluate(s: BlockPointers, source: int, goal: int, most: int) -> int:
        """Return the estimated makespan if the task at ``source`` moves behind the task at ``goal``.

        The estimate is at most ``most`` + 1. Return `DEADLOCK` if memory forbids the move, or if a successor of the
        task may run before the task at ``goal``. If ``most`` is not `NEVER`, the tasks between must run without a gap.
        """
        order, row = s.order, s.row
        moved, last = order[source], order[goal]
        rank = rank_of(s, moved)
        end = 0
        if source > row[rank]:
            end = s.start[order[source - 1]] + length_of(s, order[source - 1])
        after = 0
        if goal + 1 < row[rank + 1]:
            after = length_of(s, order[goal + 1]) + s.tail[order[goal + 1]]
        after = max(s.left[moved], after)
        # The moved task ends no earlier than if the others ran without a gap.
        whole = s.start[last] + length_of(s, last) - s.start[moved]
        if max(end, s.released[order[source + 1]]) + whole + after > most:
            return most + 1
        for e in range(entry(s, moved, FIRST_SUCCESSOR), entry(s, moved + 1, FIRST_SUCCESSOR)):
            other = s.successor[2 * e]
            if other == last or s.start[other] + length_of(s, other) <= s.start[last]:
                return DEADLOCK
        held = s.level[source]
        for k in range(source + 1, goal + 1):
            number = order[k]
            if held + entry(s, number, PEAK) > s.capacity[rank]:
                return DEADLOCK
            held += entry(s, number, NET)
            s.trial[number] = max(end, s.released[number])
            end = s.trial[number] + length_of(s, number)
        if held + entry(s, moved, PEAK) > s.capacity[rank]:
            return DEADLOCK
        after += length_of(s, moved)
        longest = max(end, s.released[moved]) + after
        k = goal
        while k > source and longest <= most:
            number = order[k]
            after = max(s.left[number], after) + length_of(s, number)
            longest = max(longest, s.trial[number] + after)
            k -= 1
        return int(min(longest, most + 1))
