"""The forwards or the backwards of a component move in time."""

from __future__ import annotations

from pipeloom.compiled import callee
from pipeloom.compiled.random import draw
from pipeloom.search.moves.move import Move
from pipeloom.search.moves.start_times import StartTimes, draw_component, draw_shift


class ShiftDirection(Move):
    """Shift all forwards, or all other tasks, of a component."""

    name = "shift one direction"
    weight = 2

    @staticmethod
    @callee
    def propose(now: StartTimes) -> None:
        """Add one shift to the starts of one direction."""
        component, shift = draw_component(now), draw_shift(now, 8.0)
        direction = draw(now.random) % 2
        for i in range(now.component_start[component], now.component_start[component + 1]):
            task = now.component_task[i]
            if now.is_backward[task] == direction:
                now.shifted[task] += shift
