"""A task moves before the first task of its critical block."""

from __future__ import annotations

from pipeloom.compiled import callee
from pipeloom.search.kernels.blocks import BlockPointers, length_of
from pipeloom.search.kernels.codes import DEADLOCK
from pipeloom.search.moves.block import Block, BlockMove, end_before, path_behind, run_next


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
    def evaluate(s: BlockPointers, source: int, goal: int, most: int) -> int:
        """Return the estimated makespan if the task at ``source`` moves before the task at ``goal``.

        Limits and results are those of `MoveBehindBlock.evaluate`, with predecessors instead of successors.
        """
        order = s.order
        first, moved = order[goal], order[source]
        end, after = end_before(s, goal), path_behind(s, source)
        whole = s.start[moved] + length_of(s, moved) - s.start[first]
        if max(end, s.released[moved]) + whole + max(s.left[order[source - 1]], after) > most:
            return most + 1
        for e in range(s.before_start[moved], s.before_start[moved + 1]):
            other = s.before[e]
            if other == first or s.start[first] + length_of(s, first) <= s.start[other]:
                return DEADLOCK
        end, held = run_next(s, moved, end, s.level[goal])
        if end < 0:
            return DEADLOCK
        for k in range(goal, source):
            end, held = run_next(s, order[k], end, held)
            if end < 0:
                return DEADLOCK
        longest = 0
        k = source - 1
        while k >= goal and longest <= most:
            number = order[k]
            after = max(s.left[number], after) + length_of(s, number)
            longest = max(longest, s.trial[number] + after)
            k -= 1
        after = max(s.left[moved], after) + length_of(s, moved)
        return int(min(max(longest, s.trial[moved] + after), most + 1))
