"""One task moves in time."""

from __future__ import annotations

from pipeloom.compiled import callee
from pipeloom.compiled.random import draw
from pipeloom.search.moves.move import Move
from pipeloom.search.moves.start_times import StartTimes, draw_shift


class ShiftTask(Move):
    """Shift one task."""

    name = "shift a task"
    weight = 5

    @staticmethod
    @callee
    def propose(now: StartTimes) -> None:
        """Add a shift to one start."""
        now.shifted[draw(now.random) % len(now.shifted)] += draw_shift(now, 2.0)
