"""A run of groups moves."""

from __future__ import annotations

from pipeloom.compiled import callee
from pipeloom.compiled.arrays import assign_run
from pipeloom.compiled.random import draw
from pipeloom.search.moves.group_order import GroupOrder, draw_places
from pipeloom.search.moves.move import Move


class MoveGroups(Move):
    """Move one to four consecutive groups to another place of the same half."""

    name = "move groups"
    weight = 64

    @staticmethod
    @callee
    def propose(now: GroupOrder) -> None:
        """Move the run at the first place to the second."""
        source, goal = draw_places(now)
        order, old = now.order, now.before
        run = 1
        if draw(now.random) % 4 == 0:
            run = 1 + draw(now.random) % 4
        if source < goal:
            run = min(run, goal - source)
            assign_run(order, source, old, source + run, goal + 1 - run - source)
            assign_run(order, goal + 1 - run, old, source, run)
        elif goal < source:
            end = now.num_forward if source < now.num_forward else len(order)
            run = min(run, end - source)
            assign_run(order, goal + run, old, goal, source - goal)
            assign_run(order, goal, old, source, run)
