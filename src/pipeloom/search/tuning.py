"""How thoroughly strategies are chosen between two searches of orders."""

from __future__ import annotations

from pipeloom.search.stopping import Watch
from pipeloom.search.strategies import (
    LAGRANGIAN_ROUNDS,
    LARGE_ROUNDS,
    ROLLOUT_ROUNDS,
    Tuner,
    choose_strategies,
)
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule

COSTS = {LAGRANGIAN_ROUNDS: 150.0, LARGE_ROUNDS: 2.5, ROLLOUT_ROUNDS: 1.0}
"""What a choice of so many rounds takes, in choices of `ROLLOUT_ROUNDS` (graphs of 6000 to 11 500 tasks: 100 to 300,
and 2.2 to 2.6). What costs most are the exchanges, for little: makespans differ by a part in a thousand."""
MOST = 0.1
"""Part of the budget's time that one choice may take if a less thorough one would do."""


class Tuning:
    """Chooses strategies as thoroughly as the time allows: for large graphs that may take as long as the search."""

    def __init__(self, graph: TaskGraph, watch: Watch) -> None:
        self.graph, self.watch, self.tuner = graph, watch, Tuner(graph)
        self.quick_s: float | None = None
        """Seconds of a choice in `ROLLOUT_ROUNDS` rounds, once there was one."""

    def choose(self, found: Schedule) -> Schedule:
        """The order with strategies chosen anew."""
        began_s, rounds = self.watch.elapsed_s(), self._rounds()
        tuned = choose_strategies(self.graph, found, tuner=self.tuner, rounds=rounds)
        if rounds == ROLLOUT_ROUNDS:
            self.quick_s = self.watch.elapsed_s() - began_s
        return tuned

    @property
    def share(self) -> float:
        """Part of the budget's time that the next choice takes; 0 where that is not known."""
        rounds = self._rounds()
        if self.watch.seconds is None or self.quick_s is None or rounds is None:
            return 0.0
        return COSTS[rounds] * self.quick_s / max(self.watch.seconds, 1e-9)

    def turns(self, left: float) -> int:
        """How many turns fit into a part of the budget: each ends with a choice, and searches for as long at least,
        the only one for what time there is.
        """
        if self.share <= 0:
            return 1_000_000
        return max(int(left > self.share), int(left / (2 * self.share)))

    def _rounds(self) -> int | None:
        """Of the Lagrangian; None: as many as the size of the graph asks for, where no clock is in the way."""
        if self.watch.seconds is None:
            return None
        if self.quick_s is not None:
            for rounds in (self.tuner.rounds, LARGE_ROUNDS):
                if COSTS[rounds] * self.quick_s <= MOST * self.watch.seconds:
                    return rounds
        return ROLLOUT_ROUNDS
