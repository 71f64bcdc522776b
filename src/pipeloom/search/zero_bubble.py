"""Zero-bubble schedules (Qi et al. 2024): split backwards, whose weight gradients fill idle time.

`zero_bubble_h1` is a fixed pattern. `zero_bubble_in_flight` orders tasks by their times, as the paper's automatic
schedules ZB-1p, ZB-2p and ZB-V do.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from pipeloom.errors import InputError, check_count
from pipeloom.search.stage_chain import as_schedule, chain_of
from pipeloom.taskgraph import FORWARD, WEIGHT_GRADIENT, PairLabel, TaskGraph
from pipeloom.timeline import Schedule


def zero_bubble_h1(graph: TaskGraph, most_behind: int | None = None) -> Schedule:
    """Run p - r forwards ahead on rank r of p, then alternate I, W and F, with W r microbatches behind I.

    Every rank then holds at most p microbatches between F and W, like the first rank of 1F1B. A backward that is not
    split counts as an I without W.

    Parameters
    ----------
    most_behind : int, optional
        Maximum number of microbatches between I and W. With recomputation, much memory is held until W.

    Raises
    ------
    InputError
        The graph has no labels, or a rank has more than one stage.
    """
    chain = chain_of(graph)
    p, m = graph.num_ranks, chain.num_microbatches
    stages = len(chain.rank_of_stage)
    if len(set(chain.rank_of_stage)) < stages:
        raise InputError("layout", "has ranks with several stages, but zero-bubble H1 needs one stage per rank")
    order: list[list[int]] = [[] for _ in range(p)]
    for stage, rank in enumerate(chain.rank_of_stage):
        forward = [chain.forward.get((stage, i), []) for i in range(m)]
        # A W directly follows its I in a chain. Here the two are separated.
        backward = [chain.backward.get((stage, i), []) for i in range(m)]
        weight = [[t for t in tasks if graph.weight_of[graph.pair[t]] == t] for tasks in backward]
        inputs = [[t for t in tasks if t not in late] for tasks, late in zip(backward, weight, strict=True)]
        ahead = min(stages - stage, m)
        behind = stage if most_behind is None else min(stage, most_behind)
        tasks = [t for unit in forward[:ahead] for t in unit]
        for i in range(m):
            tasks += inputs[i]
            if i >= behind:
                tasks += weight[i - behind]
            if i + ahead < m:
                tasks += forward[i + ahead]
        tasks += [t for unit in weight[max(0, m - behind) :] for t in unit]
        order[rank] = tasks
    return as_schedule(graph, order, "zero-bubble h1")


def zero_bubble_in_flight(graph: TaskGraph, in_flight: int, *, waits: bool = False) -> Schedule:
    """Order I, W and F greedily, with a limited number of microbatches on each rank (Qi et al. 2024, section 3).

    A free rank runs an I if one is ready, otherwise a F, otherwise a W. A microbatch is on a rank from its first F to
    its last W there; a F that would exceed the limit waits, and a W runs instead. With a limit of p microbatches this
    is ZB-1p, with 2 p it is ZB-2p. If each rank has two stages, one in each half of a V, a limit of p is ZB-V.

    Parameters
    ----------
    in_flight : int
        Maximum number of microbatches on a rank.
    waits : bool
        Whether a W only fills gaps that are at least as long as the W. Otherwise it may delay an I or F.

    Raises
    ------
    InputError
        The graph has no labels.
    """
    check_count("in_flight", in_flight)
    if graph.labels is None:
        raise InputError("graph", "has no labels", "zero-bubble schedules need a graph that was made from a layout")
    return as_schedule(graph, _Greedy(graph, graph.labels, in_flight, waits).run(), "zero-bubble")


Item = tuple[int, int, int]
"""A ready task with its priority: microbatch, chunk counted backward, and number of the task."""


@dataclass(slots=True)
class _Rank:
    """A rank during the simulation.

    Attributes
    ----------
    coming : list of int
        Times at which I and F arrive, as far as they are known.
    left : dict
        Number of unfinished tasks of each microbatch.
    admitted : set of int
        Microbatches with a task that has begun and one that has not ended.
    """

    order: list[int] = field(default_factory=list)
    free_ns: int = 0
    backwards: list[Item] = field(default_factory=list)
    forwards: list[Item] = field(default_factory=list)
    weights: list[Item] = field(default_factory=list)
    coming: list[int] = field(default_factory=list)
    left: Counter[int] = field(default_factory=Counter)
    admitted: set[int] = field(default_factory=set)


class _Greedy:
    """A simulation of an iteration in which each free rank chooses its next task."""

    def __init__(self, graph: TaskGraph, labels: Sequence[PairLabel], in_flight: int, waits: bool) -> None:
        self.graph, self.in_flight, self.waits = graph, in_flight, waits
        self.kind, self.duration = graph.kind.tolist(), graph.duration_ns.tolist()
        self.items = [
            (labels[pair].microbatch, -labels[pair].chunk, task) for task, pair in enumerate(graph.pair.tolist())
        ]
        self.missing = np.diff(graph.predecessor_start).tolist()
        self.arrival = [0] * graph.num_tasks
        self.ranks = [_Rank() for _ in range(graph.num_ranks)]
        self.home: list[int] = graph.rank.tolist()
        for rank, item in zip(self.home, self.items, strict=True):
            self.ranks[rank].left[item[0]] += 1
        self.events: list[tuple[int, int]] = []
        """Times with the task that arrives, or minus 1 and minus the number of a rank that is free again."""

    def run(self) -> list[list[int]]:
        """Return the order of every rank's tasks."""
        after = self._after()
        for task, missing in enumerate(self.missing):
            if not missing:
                self._announce(task, 0)
        while self.events:
            now = self.events[0][0]
            touched = set()
            while self.events and self.events[0][0] == now:
                touched.add(self._receive(heapq.heappop(self.events)[1], now))
            for rank in sorted(touched):
                chosen = self._choice(self.ranks[rank], now)
                if chosen is not None:
                    self._start(rank, chosen, now, after[chosen])
        return [rank.order for rank in self.ranks]

    def _after(self) -> list[list[tuple[int, int]]]:
        """Return the successors of every task, with the delay of the message."""
        graph = self.graph
        edges = list(zip(graph.successor.tolist(), graph.successor_delay_ns.tolist(), strict=True))
        return [edges[first:last] for first, last in pairwise(graph.successor_start.tolist())]

    def _announce(self, task: int, time: int) -> None:
        heapq.heappush(self.events, (time, task))
        if self.kind[task] != WEIGHT_GRADIENT:
            heapq.heappush(self.ranks[self.home[task]].coming, time)

    def _receive(self, event: int, now: int) -> int:
        """Queue a task that arrives, and return the rank that may now choose."""
        if event < 0:
            return -event - 1
        rank, kind = self.ranks[self.home[event]], self.kind[event]
        queue = {WEIGHT_GRADIENT: rank.weights, FORWARD: rank.forwards}.get(kind, rank.backwards)
        heapq.heappush(queue, self.items[event])
        while rank.coming and rank.coming[0] <= now:
            heapq.heappop(rank.coming)
        return self.home[event]

    def _choice(self, rank: _Rank, now: int) -> int | None:
        if rank.free_ns > now:
            return None
        if rank.backwards:
            return heapq.heappop(rank.backwards)[2]
        forwards = rank.forwards
        if forwards and (forwards[0][0] in rank.admitted or len(rank.admitted) < self.in_flight):
            return heapq.heappop(forwards)[2]
        if not rank.weights:
            return None
        # If F wait for memory, a W runs at once. Otherwise it may have to fit into the gap.
        fits = not rank.coming or rank.coming[0] - now >= self.duration[rank.weights[0][2]]
        return heapq.heappop(rank.weights)[2] if forwards or fits or not self.waits else None

    def _start(self, number: int, task: int, now: int, after: Sequence[tuple[int, int]]) -> None:
        rank, microbatch = self.ranks[number], self.items[task][0]
        rank.order.append(task)
        rank.free_ns = end = now + self.duration[task]
        rank.admitted.add(microbatch)
        rank.left[microbatch] -= 1
        if not rank.left[microbatch]:
            rank.admitted.discard(microbatch)
        heapq.heappush(self.events, (end, -number - 1))
        for target, delay in after:
            self.missing[target] -= 1
            self.arrival[target] = max(self.arrival[target], end + delay)
            if not self.missing[target]:
                self._announce(target, self.arrival[target])
