"""Memory strategies for a fixed order: the fastest candidates that memory allows, rank by rank.

The memory of a rank depends only on its own order, so each rank is a separate problem (DIP §5.3): choose one
candidate per pair with the least total time, such that the held bytes never exceed the capacity of the rank. A
Lagrangian method solves it and gives a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeloom.interruptible import interruptible
from pipeloom.search.budget import Meter
from pipeloom.search.kernels.strategies import choose_rank
from pipeloom.search.kernels.tables import Tables, Workspace
from pipeloom.search.params import DEFAULTS, StrategyParams
from pipeloom.search.plain import minimum_memory
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph
from pipeloom.timeline import Schedule
from pipeloom.timeline.options import first_of, pair_options

MOST_SHARE = 0.1
"""Maximum fraction of the time budget for one choice of more than ``rollout_rounds``."""
QUICK_COST = 80.0
"""Cost of a choice of ``rollout_rounds``, in static orders of the same graph, until one has been timed (40 to 160 for
graphs of 9400 to 13 400 tasks)."""


@dataclass(frozen=True, slots=True)
class Strategies:
    """The choice of one rank.

    Attributes
    ----------
    pairs, choice : array
        Pairs of the rank, and the candidate of each.
    total_ns : int
        Total duration of the tasks of these pairs, in ns.
    bound_ns : float
        Lower bound of ``total_ns`` over all choices that fit, in ns.
    """

    pairs: IntArray
    choice: IntArray
    total_ns: int
    bound_ns: float

    @property
    def gap(self) -> float:
        """Time divided by the bound, minus one."""
        return max(0.0, self.total_ns / self.bound_ns - 1) if self.bound_ns > 0 else 0.0


class StrategyChooser:
    """A chooser of strategies for many orders of one graph with candidates, on one thread."""

    def __init__(self, graph: TaskGraph, params: StrategyParams = DEFAULTS.strategies) -> None:
        self.graph, self.params = graph, params
        self.tables = make_tables(graph)
        self.workspace = _make_workspace(graph)

    def on_rank(self, order: IntArray, rank: int, rounds: int | None = None) -> Strategies:
        """Choose for the pairs of one rank under its order, in ``rounds`` or ``params.rounds`` Lagrangian rounds."""
        t, d = self.tables, self.workspace
        rows = slice(int(t.rank_start[rank]), int(t.rank_start[rank + 1]))
        rounds = self.params.rounds if rounds is None else rounds
        bound, _ = interruptible(len(order), choose_rank, t, d, order, rank, rounds)
        choice = d.choice[rows].copy()
        return Strategies(t.pair[rows], choice, total_ns(t.time[rows], choice), float(bound))

    def for_schedule(self, schedule: Schedule, rounds: int | None = None) -> Schedule:
        """Return the schedule with new candidates. It must fit with the minimum-memory candidates."""
        choice = np.zeros(self.graph.num_pairs, np.int64)
        choice[self.tables.pair] = self.tables.minimum_memory
        for rank in range(self.graph.num_ranks):
            if len(schedule.order[rank]):
                found = self.on_rank(schedule.order[rank], rank, rounds)
                choice[found.pairs] = found.choice
        return Schedule(schedule.order, choice, schedule.method)


class PacedChooser:
    """A chooser of strategies that is as thorough as time allows.

    For large graphs, a thorough choice may take as long as the search. ``like`` is a chooser for a graph of about the
    same size, for which choices take as long.
    """

    def __init__(
        self, graph: TaskGraph, meter: Meter, params: StrategyParams, like: PacedChooser | None = None
    ) -> None:
        self.graph, self.meter, self.params = graph, meter, params
        self.quick_s: float | None = None if like is None else like.quick_s
        """Seconds of a choice in the fewest rounds, once measured."""
        self.order_s = 0.0
        """Seconds of a static order, from which the time of the first choice is estimated."""

    @cached_property
    def chooser(self) -> StrategyChooser:
        """Construct the chooser as part of the first choice, so that it is timed too."""
        return StrategyChooser(self.graph, self.params)

    def choose(self, found: Schedule) -> Schedule:
        """Return the order with newly chosen strategies."""
        began_s, rounds = self.meter.elapsed_s(), self._rounds()
        chosen = self.chooser.for_schedule(found, rounds)
        if rounds == self.params.rollout_rounds:
            self.quick_s = self.meter.elapsed_s() - began_s
        return chosen

    @property
    def share(self) -> float:
        """Return the fraction of the time budget for the next choice; 0 without a time limit."""
        rounds, seconds = self._rounds(), self.meter.budget.seconds
        if seconds is None:
            return 0.0
        quick_s = QUICK_COST * self.order_s if self.quick_s is None else self.quick_s
        return self._cost(rounds) * quick_s / max(seconds, 1e-9)

    def turns(self, left: float) -> int:
        """Return how many turns fit into a part of the budget.

        Each turn ends with a choice and searches for at least as long. If there is only one turn, it searches for the
        remaining time.
        """
        if self.share <= 0:
            return 1_000_000
        if left <= 0:
            # A clock that Ctrl-C ran out may have timed choices, and then the share is not a number.
            return 0
        return max(int(left > self.share), int(left / (2 * self.share)))

    def _cost(self, rounds: int) -> float:
        """Return the cost of a choice, in choices of the fewest rounds."""
        return rounds / self.params.rollout_rounds

    def _rounds(self) -> int:
        """Return the number of Lagrangian rounds of the next choice, the fewest if time is short."""
        seconds, rounds = self.meter.budget.seconds, self.params.rounds
        if seconds is None or (self.quick_s is not None and self._cost(rounds) * self.quick_s <= MOST_SHARE * seconds):
            return rounds
        return self.params.rollout_rounds


def choose_strategies(graph: TaskGraph, schedule: Schedule, params: StrategyParams = DEFAULTS.strategies) -> Schedule:
    """Return the schedule with new candidates. Its order must fit with the minimum-memory candidates."""
    return StrategyChooser(graph, params).for_schedule(schedule)


def choose_on_rank(graph: TaskGraph, schedule: Schedule, rank: int) -> Strategies:
    """Choose candidates for the pairs of one rank under its order in the schedule."""
    return StrategyChooser(graph).on_rank(schedule.order[rank], rank)


def total_ns(time: IntArray, choice: IntArray) -> int:
    """Return the total time of all pairs under a choice, in ns. ``time`` has a row for each pair."""
    return int(time[np.arange(len(choice)), choice].sum())


def make_tables(graph: TaskGraph) -> Tables:
    """Convert the candidates of a graph for the kernels."""
    options = pair_options(graph)
    home = graph.rank[graph.forward_of]
    pair: IntArray = np.argsort(home, kind="stable")
    tasks = np.stack([graph.forward_of, graph.backward_of, graph.weight_of], axis=1)[pair]
    gradient = np.where((graph.weight_of != NO_TASK)[:, None], options.weight_gradient_bytes, 0)[pair]
    time = options.total_ns[pair]
    activation = np.ascontiguousarray(options.activation_bytes[pair])
    capacity, staging = np.full(graph.num_ranks, 1 << 60, np.int64), np.zeros(graph.num_ranks, np.int64)
    stays, staying = np.zeros(graph.num_ranks, np.bool_), np.zeros((0, time.shape[1]), np.int64)
    if graph.most_headroom_bytes is not None:
        capacity = graph.most_headroom_bytes
        if graph.staging_bytes is not None:
            staging = graph.staging_bytes
            tied = np.bincount(home, weights=(options.host_bytes > 0).all(axis=1), minlength=graph.num_ranks)
            stays = (staging > 0) & (tied == 0)
            staying = first_of(options.host_bytes == 0)[pair]
    row = np.arange(len(staying))[:, None]
    holding = np.flatnonzero(graph.edge_bytes > 0)
    host, host_capacity = np.zeros_like(options.host_bytes), np.full(graph.num_ranks, -1, np.int64)
    if graph.host_capacity_bytes is not None:
        host, host_capacity = options.host_bytes[pair], graph.host_capacity_bytes
    return Tables(
        pair=pair,
        rank_start=np.searchsorted(home[pair], np.arange(graph.num_ranks + 1)).astype(np.int64),
        time=time,
        activation=activation,
        gradient=gradient,
        minimum_memory=minimum_memory(graph)[pair],
        tasks=tasks,
        capacity=capacity,
        host=host,
        host_capacity=host_capacity,
        staging=staging,
        stays=stays,
        staying=staying,
        staying_time=time[row, staying],
        staying_activation=activation[row, staying],
        staying_gradient=gradient[row, staying],
        edge_rank=graph.rank[graph.edge_source[holding]],
        edge_source=graph.edge_source[holding],
        edge_target=graph.edge_target[holding],
        edge_bytes=graph.edge_bytes[holding],
    )


def _make_workspace(graph: TaskGraph) -> Workspace:
    tasks, pairs = graph.num_tasks, graph.num_pairs
    places = tasks if graph.host_capacity_bytes is None else 2 * tasks

    def ints(*shape: int) -> IntArray:
        return np.zeros(shape, np.int64)

    return Workspace(
        place=ints(tasks),
        capacity=ints(places),
        allocated=ints(places + 1),
        multiplier=np.zeros(places + 1),
        running=np.zeros(places + 1),
        span=ints(pairs, 3),
        choice=ints(pairs),
        other=ints(pairs),
        trial=ints(pairs),
        price=np.zeros(pairs),
        host_price=np.zeros(pairs),
        gain=np.zeros(pairs),
        move=ints(pairs),
    )
