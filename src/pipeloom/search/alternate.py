"""Search of graphs with candidates: choose which backwards to split, then alternate orders and memory strategies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from pipeloom.errors import InfeasibleError, NothingFoundError
from pipeloom.search.budget import Stretch
from pipeloom.search.components import Walks, make_walks
from pipeloom.search.context import Context
from pipeloom.search.kernels import codes
from pipeloom.search.lists import choice_of
from pipeloom.search.local import portfolio
from pipeloom.search.plain import minimum_memory
from pipeloom.search.restricted import RestrictedGraph, by_lateness, restrict_splits, split_counts, splittable
from pipeloom.search.state import Run, Search
from pipeloom.search.strategies import PacedChooser
from pipeloom.search.uniform import downhill, uniform_settings
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule, check, lower_bound, simulate, within_limits

PROBE_SHARE = 0.05
"""Fraction of the budget for the static orders of one uniform setting."""
FAR = 1.05
"""Above this multiple of the lower bound, an order for the minimum-memory candidates is tried in addition to the order
for a uniform setting."""
SPLIT_SHARE = 0.25
"""Another number of split microbatches may be started within this fraction of the budget."""


def alternate(graph: TaskGraph, context: Context, run: Run, stretch: Stretch) -> Schedule:
    """Alternate the search of orders and the choice of strategies, in a part of the budget.

    If pairs can run their backwards whole or split, static orders first determine how many microbatches are split.
    """
    best, chosen = _Incumbent(graph), None
    try:
        if splittable(graph).any():
            # Whole backwards may not fit where minimum-memory candidates of both kinds do.
            with suppress(InfeasibleError):
                chosen = _choose_split(graph, context, stretch, best)
        found = _take_turns(graph if chosen is None else chosen.graph, context, run, stretch)
        best.offer(found if chosen is None else chosen.schedule(found), or_equal=True)
    except (InfeasibleError, KeyboardInterrupt):
        if best.schedule is None:
            raise
    return best.found()


class _Incumbent:
    """The best schedule of a graph so far."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.schedule: Schedule | None = None
        self.ns = codes.NEVER

    def found(self) -> Schedule:
        """Return the schedule, or raise `NothingFoundError` if no schedule satisfied the limits."""
        if self.schedule is None:
            raise NothingFoundError(
                "every schedule that was tried exceeds the host memory or the staging memory of a rank; "
                "add strategies that hold less on the rank itself, such as recompute"
            )
        return self.schedule

    def offer(self, schedule: Schedule, or_equal: bool = False) -> int:
        """Take a schedule if it is better; return its makespan.

        An order that fits under one choice of strategies may not fit under another, for example one that offloads or
        that splits pairs. Such a schedule is rejected.
        """
        timeline = simulate(self.graph, schedule)
        # Peaks include bytes that tasks without duration hold. `check` does not count them.
        if not within_limits(self.graph, schedule, timeline) and check(self.graph, schedule):
            return codes.NEVER
        makespan = timeline.makespan_ns
        if makespan < self.ns + or_equal:
            self.schedule, self.ns = schedule, makespan
        return makespan


def _choose_split(graph: TaskGraph, context: Context, stretch: Stretch, best: _Incumbent) -> RestrictedGraph:
    """Split none, some and then more of the last microbatches; keep the number that is best with static orders.

    Raise `InfeasibleError` if whole backwards do not fit on the device or on the host.
    """
    can = splittable(graph)
    chosen = restricted = restrict_splits(graph, np.zeros(graph.num_pairs, np.bool_))
    lateness: IntArray | None = None
    for count in split_counts(graph):
        if best.schedule is not None and context.meter.spent >= SPLIT_SHARE * stretch.until:
            break
        if lateness is not None:
            restricted = restrict_splits(graph, can & (lateness < count))
        smallest = minimum_memory(restricted.graph)
        try:
            search = Search(restricted.graph.with_candidates(smallest), context)
        except InfeasibleError:
            # The bytes that a split backward holds between its halves may not fit even if whole backwards do.
            if lateness is None:
                raise
            break
        with context.meter.until_interrupted():
            portfolio(search)
        inner = Schedule(search.orders(), smallest, context.method)
        try:
            with_strategies = PacedChooser(restricted.graph, context.meter, context.params.strategies).choose(inner)
        except KeyboardInterrupt:
            best.offer(restricted.schedule(inner))
            raise
        for schedule in (with_strategies, inner):
            before = best.ns
            if best.offer(restricted.schedule(schedule)) < before:
                chosen = restricted
        if lateness is None:
            lateness = by_lateness(graph, simulate(graph, best.found()))
        if best.ns <= context.bound.ns:
            break
    return chosen


class _Plan(NamedTuple):
    """The start of the turns: the strategies for the first search of orders, and the maximum number of turns.

    The first turn continues ``search``, or tries the order of ``like`` first.
    """

    candidate: IntArray
    rounds: int
    search: Search | None = None
    like: Search | None = None


class _Turns:
    """Alternating search of orders and strategies of one graph."""

    def __init__(self, graph: TaskGraph, context: Context, stretch: Stretch) -> None:
        self.graph, self.context, self.stretch = graph, context, stretch
        self.walks: Walks | None = None if graph.capacity_bytes is None else make_walks(graph)
        self.chooser = PacedChooser(graph, context.meter, context.params.strategies)
        _ = self.chooser.chooser  # its tables, before the search, which has the time that remains
        self.smallest = minimum_memory(graph)
        self.best = _Incumbent(graph)

    def begin(self) -> _Plan:
        """Choose the strategies for the first search of orders.

        DIP starts from the minimum-memory candidates (DIP §5.2). Here, the start is the uniform setting that is
        best with static orders, or the strategies found with the layout if they are better. If the result is far from
        the bound, strategies must differ between pairs. It is then often better to find an order for the minimum-memory
        candidates and to choose strategies that use the remaining memory.
        """
        params, meter = self.context.params.turns, self.context.meter
        probes = [*self._under_rules()]
        if (found := self._best_uniform()) is not None:
            probes.append((np.full(self.graph.num_pairs, found[0], np.int64), found[1]))
        if not probes:
            return _Plan(self.smallest, params.lean_rounds)
        candidate, probe = min(probes, key=lambda each: each[1].best_ns)
        self.chooser.order_s = probe.pace.seconds / max(1, probe.pace.evaluations)
        plan = _Plan(candidate, params.uniform_rounds, search=probe)
        if probe.best_ns <= FAR * self.context.bound.ns:
            return plan
        smallest = self._search(self.smallest)
        self._probe(smallest, self.smallest)
        under_setting, _ = self.offer(probe, plan.candidate)
        under_smallest, chosen = self.offer(smallest, self.smallest)
        if under_smallest < under_setting:
            plan = _Plan(chosen, params.chosen_rounds, like=smallest)
        return plan._replace(rounds=min(plan.rounds, self.chooser.turns(self.stretch.until - meter.spent)))

    def _best_uniform(self) -> tuple[int, Search] | None:
        """Return the uniform setting with the best static orders, and its search.

        Return None if memory is unlimited or no setting fits.
        """
        if self.graph.capacity_bytes is None:
            return None
        searches: dict[int, Search] = {}

        def makespan(setting: int) -> float:
            candidate = np.full(self.graph.num_pairs, setting)
            try:
                # It is not worth seconds of search to find out whether a setting fits in an unusual order.
                search = self._search(candidate, states=0)
            except InfeasibleError:
                return float("inf")
            self._probe(search, candidate)
            searches[setting] = search
            return float(search.best_ns)

        setting = downhill(uniform_settings(self.graph), makespan)
        return None if setting is None else (setting, searches[setting])

    def _under_rules(self) -> Iterator[tuple[IntArray, Search]]:
        """Yield the strategies that belong to each rule of the layout, and a search under them, if they fit."""
        for rule in self.context.params.rules:
            candidate = choice_of(self.graph, rule)
            if candidate is None:
                continue
            with suppress(InfeasibleError):
                search = self._search(candidate, states=0)
                self._probe(search, candidate)
                yield candidate, search

    def _search(self, candidate: IntArray, states: int | None = None) -> Search:
        return Search(self.graph.with_candidates(candidate), self.context, walks=self.walks, states=states)

    def _probe(self, search: Search, candidate: IntArray) -> None:
        """Try static orders in a small part of the budget, and offer the best of them under these strategies."""
        meter = self.context.meter
        with meter.until_interrupted():
            portfolio(search, Stretch(meter.spent, meter.spent + PROBE_SHARE))
        self.best.offer(Schedule(search.orders(), candidate, self.context.method))

    def offer(self, search: Search, candidate: IntArray) -> tuple[int, IntArray]:
        """Offer the order of a search as it is and with strategies chosen for it.

        Return the makespan with the chosen strategies, and these strategies.
        """
        found = Schedule(search.orders(), candidate, self.context.method)
        self.best.offer(found)
        chosen = self.chooser.choose(found)
        assert chosen.candidate is not None
        if (makespan := self.best.offer(chosen)) == codes.NEVER:
            return self.best.offer(found), candidate
        return makespan, chosen.candidate

    def turn(self, number: int, plan: _Plan, until: float, run: Run) -> Search:
        """Search orders under the strategies of the plan."""
        graph, context = self.graph.with_candidates(plan.candidate), self.context
        # An order can only reach the lower bound under these strategies, so this bound decides when to stop.
        target = max(context.bound.ns, lower_bound(graph).ns)
        if plan.search is not None:
            # The search that selected the setting has already tried the static orders, so continue it.
            search = plan.search.aimed_at(target)
        else:
            search = Search(graph, context, target_ns=target, seed=context.seed + number, walks=self.walks)
        with context.meter.until_interrupted():
            if plan.like is not None:
                search.try_like(plan.like)
            run(search, Stretch(context.meter.spent, until))
        return search


def _take_turns(graph: TaskGraph, context: Context, run: Run, stretch: Stretch) -> Schedule:
    """Search orders under one choice of strategies, then choose strategies that fit this order, and repeat."""
    turns, meter = _Turns(graph, context, stretch), context.meter
    try:
        plan = turns.begin()
        begin, rounds = meter.spent, plan.rounds
        for number in range(rounds):
            until = begin + (stretch.until - begin) * (number + 1) / rounds - turns.chooser.share
            search = turns.turn(number, plan, until, run)
            _, chosen = turns.offer(search, plan.candidate)
            plan = _Plan(chosen, rounds, like=search)
            # Another turn ends with another choice of strategies and searches for at least as long.
            share = turns.chooser.share
            late = share > 0 and meter.spent + 2 * share >= stretch.until
            if late or meter.left(1) == 0 or turns.best.ns <= context.bound.ns:
                break
    except KeyboardInterrupt:
        if turns.best.schedule is None:
            raise
    return turns.best.found()
