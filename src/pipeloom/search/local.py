"""Local search and annealing on the order of groups, starting from the best static order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np

from pipeloom.search.budget import WHOLE, Stretch
from pipeloom.search.kernels import codes
from pipeloom.search.kernels.climb import climb, make_walk
from pipeloom.search.kernels.terms import Terms
from pipeloom.search.lists import Priorities
from pipeloom.search.moves import ORDER_MOVES
from pipeloom.search.moves.move import Move, Tally, make_tally
from pipeloom.search.scratch import make_scratch
from pipeloom.search.starts import starts
from pipeloom.search.state import Pace, Search, add_count
from pipeloom.taskgraph import IntArray

_TASKS_PER_OFFER = 2000
"""Number of tasks up to which results are measured and synchronized after every round. Larger graphs do this less often
in proportion, since it would take most of the time."""


def portfolio(search: Search, stretch: Stretch | None = None) -> None:
    """Try starts until the budget, or its part ``stretch``, is spent, but at least one order of groups.

    The next call continues with the remaining starts.
    """
    if search.starts is None:
        search.starts = starts(search)
    began_s, before = search.meter.elapsed_s(), search.meter.used
    until = 1.0 if stretch is None else stretch.until
    while search.ordered.ns >= codes.NEVER or (search.round_size() > 0 and search.meter.spent < until):
        name, start = next(search.starts, ("", None))
        if start is None:
            break
        best_ns = search.best_ns
        if isinstance(start, Priorities):
            search.try_rule(start)
        else:
            search.try_order(*start)
        add_count(search.context.starts, name, 1, search.best_ns < best_ns)
    search.pace = Pace(search.meter.used - before, search.meter.elapsed_s() - began_s)


class Climber(Protocol):
    """The search of one thread.

    ``state`` has the current and the best makespan, in ns, and ``tally`` how often each of its moves was tried and
    improved.
    """

    state: IntArray
    tally: Tally

    @property
    def moves(self) -> Sequence[type[Move]]:
        """Moves that it makes."""
        ...

    def restart(self, search: Search) -> None:
        """Continue from the incumbent."""
        ...

    def climb(self, search: Search, terms: Terms) -> int:
        """Make about the given number of evaluations; return how many were made."""
        ...

    def offer(self, search: Search) -> None:
        """Make the best found the incumbent."""
        ...


class _Climber:
    """The local search of one thread."""

    moves = ORDER_MOVES

    def __init__(self, search: Search, seed: int) -> None:
        self.scratch, self.tally = make_scratch(search.packed), make_tally(self.moves)
        self.random = np.array([seed | 1], np.uint64)
        self.restart(search)

    def restart(self, search: Search) -> None:
        """Continue from the incumbent."""
        # The incumbent may be a list of tasks, so start from the best order of groups.
        self.walk = make_walk(*search.ordered, self.random)
        self.state = self.walk.state

    def climb(self, search: Search, terms: Terms) -> int:
        """Make up to the given number of evaluations; return how many were made."""
        return int(climb(search.packed, self.scratch, self.walk, self.tally, terms))

    def offer(self, search: Search) -> None:
        """Make the best order the incumbent."""
        search.adopt(int(self.state[1]), self.walk.best_order, self.walk.best_choice)


def local_search(search: Search, stretch: Stretch = WHOLE, heat: float = 0.0) -> None:
    """Climb from the incumbent until a part of the budget is spent or the target is reached.

    With more than one thread, the number of evaluations that fits into a deadline, and so the result, may differ.
    ``heat`` is the initial annealing temperature, in mean task durations. It falls to 0 over the part of the budget. 0
    accepts only changes that are not worse.
    """
    if len(search.ordered.order) < 2:
        return
    climb_together(search, partial(_Climber, search), stretch, heat)


def climb_together(search: Search, make: Callable[[int], Climber], stretch: Stretch, heat: float) -> None:
    """Run a climber per thread, each with its seed. From time to time, the others continue from the best result."""
    seeds = search.random.integers(1, 1 << 62, size=search.context.threads).tolist()
    climbers, threads, rounds = [make(seed) for seed in seeds], len(seeds), 0
    mean_task_ns = float(search.graph.duration_ns.mean())
    every = max(1, search.graph.num_tasks // _TASKS_PER_OFFER)
    pool = ThreadPoolExecutor(threads) if threads > 1 else None
    try:
        for count in search.rounds(stretch):
            temperature = heat * mean_task_ns * stretch.cooling(search.meter.spent)
            if pool is None:
                used = [climbers[0].climb(search, Terms(temperature, search.target_ns, count))]
            else:
                share = max(1, count // threads) if search.meter.budget.evaluations is not None else count
                terms = Terms(temperature, search.target_ns, share)
                used = list(pool.map(lambda climber: climber.climb(search, terms), climbers))  # noqa: B023
            search.meter.used += sum(used)
            rounds += 1
            if rounds % every == 0 or min(climber.state[1] for climber in climbers) <= search.target_ns:
                _meet(search, climbers)
            else:
                search.report()
    finally:
        # After Ctrl-C, other threads are still running.
        if pool is not None:
            pool.shutdown()
        if rounds % every:
            _meet(search, climbers)
        for climber in climbers:
            search.count_moves(climber.moves, climber.tally)


def _meet(search: Search, climbers: Sequence[Climber]) -> None:
    """Make the best result the incumbent, from which the others continue."""
    best = min(climbers, key=lambda climber: int(climber.state[1]))
    if best.state[1] >= search.best_ns:
        search.report()
        return
    best.offer(search)
    for climber in climbers:
        if climber is not best:
            climber.restart(search)
