"""The state of a search of one graph: the packed graph, the incumbent and the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipeloom.errors import InfeasibleError, InputError
from pipeloom.search.budget import Meter, Stretch
from pipeloom.search.components import MOST_STATES, Walks, memory_matters
from pipeloom.search.context import Context
from pipeloom.search.kernels import codes
from pipeloom.search.kernels.blocks import make_blocks, measure, sequence_of
from pipeloom.search.kernels.by_task import Ranks, decode_by_task, make_ranks
from pipeloom.search.kernels.climb import evaluate, expand
from pipeloom.search.lists import GroupPriorities, Priorities, priorities_of_sequence
from pipeloom.search.moves.move import Move, Tally
from pipeloom.search.packed import PackedGraph, pack_graph
from pipeloom.search.params import SearchParams
from pipeloom.search.result import Count, Progress
from pipeloom.search.reverse import reversed_graph
from pipeloom.search.scratch import Scratch, make_scratch
from pipeloom.taskgraph import IntArray, TaskGraph

STEPS_PER_ROUND = 400_000
"""Number of tasks that a kernel may schedule before it returns to check the clock: about 10 ms."""
_LOOKAHEAD = 256
"""Number of ready tasks that a rank examines before it waits, if the priorities are those of tasks."""


class Pace(NamedTuple):
    """A number of evaluations and their seconds."""

    evaluations: int
    seconds: float


class OrderedGroups(NamedTuple):
    """An order of groups, its choices, and the makespan of its schedule."""

    order: IntArray
    choice: IntArray
    ns: int


class Search:
    """The search of one graph, with its candidates chosen.

    Parameters
    ----------
    target_ns : int, optional
        Makespan at which to stop. None: the bound of the context.
    seed : int, optional
        None: the seed of the context.
    walks : Walks, optional
        Walks of this graph under any candidates.
    states : int, optional
        Maximum number of states of a component to try for an order that fits. None: `MOST_STATES`.

    Attributes
    ----------
    best_ns : int
        Makespan of the incumbent.
    sequence : array
        Tasks of the incumbent in a topological order.
    ordered : OrderedGroups
        The best order of groups.
    starts : iterator, optional
        Names and priorities of starts that have not been tried.
    pace : Pace
        Pace of the last static orders.
    """

    def __init__(
        self,
        graph: TaskGraph,
        context: Context,
        *,
        target_ns: int | None = None,
        seed: int | None = None,
        walks: Walks | None = None,
        states: int | None = None,
    ) -> None:
        _refuse_long_times(graph)
        self.graph, self.context = graph, context
        self.packed, self.groups, components = pack_graph(graph, walks, MOST_STATES if states is None else states)
        self.target_ns = context.bound.ns if target_ns is None else target_ns
        self.random = np.random.default_rng(context.seed if seed is None else seed)
        self.best_ns = codes.NEVER
        self.sequence = components.order
        choice = np.array([0, 0, 0, 1, codes.ALL_URGENT], np.int64)
        self.ordered = OrderedGroups(np.arange(len(self.groups.first)), choice, codes.NEVER)
        self.rule = codes.BANKER if memory_matters(graph) else codes.UNLIMITED
        self.starts: Iterator[tuple[str, GroupPriorities | Priorities]] | None = None
        self.pace = Pace(0, 0.0)

    def aimed_at(self, target_ns: int) -> Search:
        """Return a copy of the search with another target, including the incumbent and the remaining starts."""
        other = copy(self)
        other.target_ns = target_ns
        return other

    @property
    def meter(self) -> Meter:
        """Progress against the budget."""
        return self.context.meter

    @property
    def params(self) -> SearchParams:
        """Parameters of the search."""
        return self.context.params

    @property
    def done(self) -> bool:
        """Whether the incumbent cannot be improved."""
        return self.best_ns <= self.target_ns

    @property
    def limited(self) -> bool:
        """Whether memory matters, because not everything fits at once."""
        return self.rule != codes.UNLIMITED

    @cached_property
    def reverse(self) -> PackedGraph | None:
        """The graph with time reversed. None if it cannot be reversed or no order fits."""
        graph = reversed_graph(self.graph)
        if graph is None:
            return None
        try:
            return pack_graph(graph)[0]
        except InfeasibleError:
            # The search for an order of a component may fail only on the reversed graph.
            return None

    @property
    def listed(self) -> bool:
        """Whether the incumbent is a list of tasks rather than a group order."""
        return self.best_ns < self.ordered.ns

    @cached_property
    def scratch(self) -> Scratch:
        """Arrays of list scheduling."""
        return make_scratch(self.packed)

    @cached_property
    def _ranks(self) -> Ranks:
        return make_ranks(self.packed)

    def round_size(self, until: float = 1.0) -> int:
        """Return the evaluations for the next kernel call; 0 when the search, or its part ``until``, is over."""
        if self.done:
            return 0
        return self.meter.left(max(1, STEPS_PER_ROUND // self.graph.num_tasks), until)

    def rounds(self, stretch: Stretch) -> Iterator[int]:
        """Yield round sizes until the part of the budget is spent or the target is reached."""
        while self.meter.spent < stretch.until and (count := self.round_size(stretch.until)):
            yield count

    def play(self, order: IntArray, choice: IntArray, bound: int = codes.NEVER) -> int:
        """Return the makespan of an order or a negative code. Orders at or above ``bound`` may be aborted."""
        return int(evaluate(self.packed, self.scratch, order, choice, bound))

    def try_order(self, order: IntArray, choice: IntArray) -> int:
        """Evaluate one order; keep it if it is the best so far. Return its makespan or a negative code."""
        self.meter.used += 1
        makespan = self.play(order, choice, self.ordered.ns)
        if 0 <= makespan < self.ordered.ns:
            self._keep_order(makespan, order, choice)
        return makespan

    def try_sequence(self, sequence: IntArray) -> int:
        """Measure a sequence of all tasks; keep it if it is the best so far. Return its makespan."""
        blocks = make_blocks(self.packed, sequence)
        makespan = int(measure(self.packed, blocks))
        assert makespan >= 0, makespan
        if makespan < self.best_ns:
            self.keep(makespan, sequence_of(self.packed, blocks))
        return makespan

    def try_rule(self, priorities: Priorities) -> int:
        """Schedule by priorities of tasks and keep the best result so far. Return the makespan or a negative code."""
        self.meter.used += 1
        order, rule = priorities
        made = np.empty_like(order)
        if decode_by_task(self.packed, self._ranks, order, made, _LOOKAHEAD, codes.NEVER, rule) < 0:
            return codes.DEADLOCK
        # Tasks for which a rank waited may begin earlier.
        blocks = make_blocks(self.packed, made)
        makespan = int(measure(self.packed, blocks))
        if 0 <= makespan < self.best_ns:
            self.keep(makespan, blocks.sorted)
        return makespan

    def try_like(self, other: Search) -> int:
        """Evaluate the order of another search of the same graph under other candidates, and its list of tasks.

        Groups may differ, since they depend on durations, so the order is transferred by segments.
        """
        if other.listed:
            self.try_rule(priorities_of_sequence(self.graph, other.sequence))
        expand(other.packed, other.scratch, other.ordered.order)
        packed = self.packed
        place = [
            int(other.scratch.position[packed.group_segment[a:b]].min())
            for a, b in pairwise(packed.group_start.tolist())
        ]
        forward, backward = np.split(np.arange(len(place)), [int(packed.num_groups[0])])
        keys = np.array(place)
        order = np.concatenate([forward[np.argsort(keys[forward])], backward[np.argsort(keys[backward])]])
        choice = other.ordered.choice.copy()
        choice[[codes.RULE, codes.LOOKAHEAD]] = self.rule, 1
        return self.try_order(order, choice)

    def adopt(self, makespan: int, order: IntArray, choice: IntArray) -> None:
        """Keep an order that a kernel found to give ``makespan``, if it is the best so far."""
        if makespan < self.best_ns:
            again = self.play(order, choice)
            assert again == makespan, (again, makespan)
            self._keep_order(makespan, order, choice)

    def _keep_order(self, makespan: int, order: IntArray, choice: IntArray) -> None:
        """Keep the order that was evaluated last."""
        self.ordered = OrderedGroups(order.copy(), choice.copy(), makespan)
        if makespan < self.best_ns:
            self.keep(makespan, self.scratch.sequence)

    def keep(self, makespan: int, sequence: IntArray) -> None:
        """Make a sequence the incumbent and report it."""
        self.best_ns = makespan
        self.sequence = sequence.copy()
        self.report()

    def count_moves(self, moves: Sequence[type[Move]], tally: Tally) -> None:
        """Add the counts of a local search to those of the whole search."""
        for move, (tried, improved) in zip(moves, tally.counts.tolist(), strict=True):
            add_count(self.context.moves, move.name, tried, improved)

    def report(self) -> None:
        """Report the progress to the caller."""
        if self.context.on_progress is not None:
            state = Progress(self.meter.elapsed_s(), self.meter.used, self.best_ns, self.context.bound.ns)
            self.context.on_progress(state)

    def orders(self) -> tuple[IntArray, ...]:
        """Return the incumbent as one order per rank."""
        rank = self.graph.rank[self.sequence]
        return tuple(self.sequence[rank == r] for r in range(self.graph.num_ranks))


def add_count(counts: dict[str, Count], name: str, tried: int, improved: int) -> None:
    """Add to the count of a name."""
    before = counts.get(name, Count(0, 0))
    counts[name] = Count(before.tried + tried, before.improved + improved)


def _refuse_long_times(graph: TaskGraph) -> None:
    """Raise `InputError` if times are too long to be packed with a rank into one integer."""
    total_ns = int(graph.duration_ns.sum()) + int(graph.successor_delay_ns.sum())
    most_ns = codes.NEVER >> (graph.num_ranks - 1).bit_length()
    if total_ns >= most_ns:
        raise InputError(
            "instance",
            f"durations and delays sum to {total_ns / 1e9:g} s, which is not below the {most_ns / 1e9:g} s that the "
            f"search can count on {graph.num_ranks} ranks",
            "give smaller times",
        )


Run = Callable[[Search, Stretch], None]
"""Searches until a part of the budget is spent."""
