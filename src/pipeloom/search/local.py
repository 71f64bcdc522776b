"""Local search and annealing on the order of groups (the portfolio's best is the start)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from pipeloom.search import kernels
from pipeloom.search.portfolio import starts
from pipeloom.search.scratch import make_scratch
from pipeloom.search.state import Search
from pipeloom.taskgraph import IntArray

FLIP_EVERY = 64
"""One change in so many is of the policy."""

WHOLE_MICROBATCHES = 13
"""Of sixteen changes to the order, so many move whole microbatches."""


def portfolio(search: Search, until: float = 1.0) -> None:
    """Try the static heuristics, all of them if the budget, or its part ``until``, allows.

    Asked again, it goes on with those that are left.
    """
    if search.starts is None:
        search.starts = starts(search.problem, search.groups, search.rule)
    while search.best_ns >= kernels.NEVER or (
        search.round_size() > 0 and search.watch.share(search.evaluations) < until
    ):
        start = next(search.starts, None)
        if start is None:
            return
        search.try_order(start.order, start.choice)


class Climber(Protocol):
    """One thread's search: ``state`` is its current and its best makespan."""

    state: IntArray

    def restart(self, search: Search) -> None:
        """Go on from the incumbent."""
        ...

    def climb(self, search: Search, temperature: float, count: int) -> int:
        """Make about ``count`` evaluations; return how many were made."""
        ...

    def offer(self, search: Search) -> None:
        """Make the best found the incumbent."""
        ...


class _Climber:
    """One thread's local search."""

    def __init__(self, search: Search, seed: int) -> None:
        self.scratch = make_scratch(search.problem)
        self.beside = make_scratch(search.problem)
        self.orders = np.empty((2, len(search.order)), np.int64)
        self.choices = np.empty((2, len(search.choice)), np.int64)
        self.made = np.zeros((2, 2), np.int64)
        self.random = np.array([seed | 1], np.uint64)
        self.restart(search)

    def restart(self, search: Search) -> None:
        """Go on from the incumbent."""
        self.order, self.choice = search.order.copy(), search.choice.copy()
        self.best_order: IntArray = search.order.copy()
        self.best_choice: IntArray = search.choice.copy()
        self.state = np.array([search.best_ns, search.best_ns], np.int64)

    def climb(self, search: Search, temperature: float, count: int) -> int:
        """Make up to ``count`` evaluations; return how many were made."""
        problem, order, choice = search.problem, self.order, self.choice
        rest = (
            self.best_order, self.best_choice, self.state, self.random, temperature, search.target_ns, count,
            FLIP_EVERY, WHOLE_MICROBATCHES,
        )  # fmt: skip
        if search.rule != kernels.UNLIMITED:
            return int(kernels.climb(problem, self.scratch, order, choice, self.orders[0], *rest))
        return int(
            kernels.climb_two(
                problem, self.scratch, self.beside, order, choice, self.orders, self.choices, self.made, *rest
            )
        )

    def offer(self, search: Search) -> None:
        """Make the best order the incumbent."""
        search.adopt(int(self.state[1]), self.best_order, self.best_choice)


def local_search(
    search: Search, temperature: float = 0.0, threads: int = 1, until: float = 1.0, since: float = 0.0
) -> None:
    """Climb from the incumbent until the budget (or its part ``until``) is spent or the target is reached.

    Parameters
    ----------
    temperature : float
        Start of the annealing, in mean durations of a task, falling to zero between the parts ``since`` and
        ``until`` of the budget; 0 accepts only what is not worse.
    threads : int
        Climbers side by side; after every round those that are behind go on from the incumbent. With more
        than one, the number of evaluations that fits into a deadline, and so the result, may differ.
    """
    if len(search.order) < 2:
        return
    seeds = search.random.integers(1, 1 << 62, size=threads)
    climb_together(search, [_Climber(search, int(seed)) for seed in seeds], temperature, until, since)


def climb_together(
    search: Search, climbers: Sequence[Climber], temperature: float, until: float, since: float
) -> None:
    """Let climbers search side by side, a thread each, as `local_search` says."""
    threads = len(climbers)
    pool = ThreadPoolExecutor(threads) if threads > 1 else None
    try:
        while search.watch.share(search.evaluations) < until:
            count = search.round_size(until)
            if count == 0:
                break
            spent = search.watch.share(search.evaluations)
            heat = temperature * search.mean_task_ns * max(0.0, 1 - (spent - since) / (until - since))
            if pool is None:
                used = [climbers[0].climb(search, heat, count)]
            else:
                share = max(1, count // threads) if search.watch.evaluations is not None else count
                used = list(pool.map(lambda climber: climber.climb(search, heat, share), climbers))  # noqa: B023
            search.evaluations += sum(used)
            best = min(climbers, key=lambda climber: int(climber.state[1]))
            if best.state[1] < search.best_ns:
                best.offer(search)
                for climber in climbers:
                    if climber is not best and threads > 1:
                        climber.restart(search)
            else:
                search.report()
    finally:
        if pool is not None:
            pool.shutdown()
