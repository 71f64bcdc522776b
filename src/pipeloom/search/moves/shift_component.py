"""A component moves in time."""

from __future__ import annotations

from pipeloom.compiled import callee
from pipeloom.search.moves.move import Move
from pipeloom.search.moves.start_times import StartTimes, draw_component, draw_shift


class ShiftComponent(Move):
    """Shift all tasks of a component."""

    name = "shift a component"
    weight = 1

    @staticmethod
    @callee
    def propose(now: StartTimes) -> None:
        """Add one shift to all starts of a component."""
        component, shift = draw_component(now), draw_shift(now, 8.0)
        for i in range(now.component_start[component], now.component_start[component + 1]):
            now.shifted[now.component_task[i]] += shift
