"""A task moves behind the last task of its critical block."""

from __future__ import annotations

from pipeloom.compiled import callee
from pipeloom.search.kernels.blocks import Blocks, entry, length_of
from pipeloom.search.kernels.codes import DEADLOCK
from pipeloom.search.moves.block import Block, BlockMove, end_before, may_precede, path_behind, run_next
from pipeloom.search.packed import FIRST_SUCCESSOR


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
            if other == last or may_precede(blocks, other, last):
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
