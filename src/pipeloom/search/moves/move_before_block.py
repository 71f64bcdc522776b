"""A task moves before the first task of its critical block."""

from __future__ import annotations

from pipeloom.compiled import callee
from pipeloom.search.kernels.blocks import Blocks, length_of
from pipeloom.search.kernels.codes import DEADLOCK
from pipeloom.search.moves.block import Block, BlockMove, end_before, may_precede, path_behind, run_next


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
            if other == first or may_precede(blocks, first, other):
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
