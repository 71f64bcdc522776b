"""Two components change places in time."""

from __future__ import annotations

from pipeloom.compiled import callee
from pipeloom.search.moves.move import Move
from pipeloom.search.moves.start_times import StartTimes, draw_component


class ExchangeComponents(Move):
    """Let each of two components begin when the other did."""

    name = "exchange components"
    weight = 2

    @staticmethod
    @callee
    def propose(now: StartTimes) -> None:
        """Shift all tasks of two components by the difference of their starts."""
        one, other = draw_component(now), draw_component(now)
        first = now.component_start
        distance = now.start[now.component_task[first[other]]] - now.start[now.component_task[first[one]]]
        for i in range(first[other], first[other + 1]):
            now.shifted[now.component_task[i]] -= distance
        for i in range(first[one], first[one + 1]):
            now.shifted[now.component_task[i]] += distance
