"""A task moves before the first task of its critical block."""

from __future__ import annotations

from pipeloom.compiled import callee
from pipeloom.search.kernels.blocks import BlockPointers, entry, length_of, rank_of
from pipeloom.search.kernels.codes import DEADLOCK
from pipeloom.search.moves.block import Block
from pipeloom.search.moves.move import Move
from pipeloom.search.packed import NET, PEAK


class MoveBeforeBlock(Move):
    """Move a task before the first task of its block."""

    name = "move before a block"
    weight = 0
    """All such moves are evaluated; none is drawn."""

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
    def evaluate(s: BlockPointers, source: int, goal: int, most: int) -> int:
        """Return the estimated makespan if the task at ``source`` moves before the task at ``goal``.

        Limits and results are those of `MoveBehindBlock.evaluate`, with predecessors instead of successors.
        """
        order, row = s.order, s.row
        first, moved = order[goal], order[source]
        rank = rank_of(s, moved)
        end = 0
        if goal > row[rank]:
            end = s.start[order[goal - 1]] + length_of(s, order[goal - 1])
        after = 0
        if source + 1 < row[rank + 1]:
            after = length_of(s, order[source + 1]) + s.tail[order[source + 1]]
        whole = s.start[moved] + length_of(s, moved) - s.start[first]
        if max(end, s.released[moved]) + whole + max(s.left[order[source - 1]], after) > most:
            return most + 1
        for e in range(s.before_start[moved], s.before_start[moved + 1]):
            other = s.before[e]
            if other == first or s.start[first] + length_of(s, first) <= s.start[other]:
                return DEADLOCK
        held = s.level[goal]
        if held + entry(s, moved, PEAK) > s.capacity[rank]:
            return DEADLOCK
        held += entry(s, moved, NET)
        s.trial[moved] = max(end, s.released[moved])
        end = s.trial[moved] + length_of(s, moved)
        for k in range(goal, source):
            number = order[k]
            if held + entry(s, number, PEAK) > s.capacity[rank]:
                return DEADLOCK
            held += entry(s, number, NET)
            s.trial[number] = max(end, s.released[number])
            end = s.trial[number] + length_of(s, number)
        longest = 0
        k = source - 1
        while k >= goal and longest <= most:
            number = order[k]
            after = max(s.left[number], after) + length_of(s, number)
            longest = max(longest, s.trial[number] + after)
            k -= 1
        after = max(s.left[moved], after) + length_of(s, moved)
        return int(min(max(longest, s.trial[moved] + after), most + 1))
