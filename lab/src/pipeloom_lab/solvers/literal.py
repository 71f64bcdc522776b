"""DIP's planner as its paper prints it: its memory rule, a program for every rank of every rollout (DIP §5).

Where the paper leaves a choice open: an order that deadlocks, because every rank's forward queue is disabled, gets no
score; the first order is the one that our admission finds, so that there is always an answer.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from pipeloom.search.budget import Budget, Stretch
from pipeloom.search.context import begin
from pipeloom.search.kernels import codes
from pipeloom.search.params import DEFAULTS, StrategyParams
from pipeloom.search.plain import minimum_memory
from pipeloom.search.state import Search
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule, simulate
from pipeloom_lab.solvers.integer_program import program_choice
from pipeloom_lab.solvers.rollouts import RolloutChooser, RolloutSearch
from pipeloom_lab.solvers.sequences import Sequences, published_choice, try_first
from pipeloom_lab.solvers.tree import mcts_sequence

_REMEMBERED = 64


class ProgramChooser(RolloutChooser):
    """Chooses strategies by the papers' integer program instead of a Lagrangian method.

    The last choices are cached, since a search asks again for the order that it keeps.
    """

    def __init__(self, graph: TaskGraph, params: StrategyParams = DEFAULTS.strategies) -> None:
        super().__init__(graph, params)
        self._known: OrderedDict[bytes, tuple[int, IntArray]] = OrderedDict()
        self._chosen: IntArray = np.zeros(graph.num_pairs, np.int64)

    def another(self) -> ProgramChooser:
        """Return a chooser for another thread, which shares the cache of choices."""
        made = ProgramChooser(self.graph, self.params)
        made._known = self._known
        return made

    def choose(self, sequence: IntArray) -> int:
        """Choose candidates for a feasible sequence of all tasks, and return the resulting makespan."""
        key, graph = sequence.tobytes(), self.graph
        if key not in self._known:
            orders = tuple(sequence[graph.rank[sequence] == rank] for rank in range(graph.num_ranks))
            self._chosen = program_choice(self, orders)
            makespan = simulate(graph, Schedule(orders, self._chosen, "program")).makespan_ns
            self._known[key] = self.judged(sequence, makespan), self._chosen
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        makespan, self._chosen = self._known[key]
        return makespan

    def choice(self) -> IntArray:
        """Return the chosen candidate of every pair."""
        return self._chosen


def dip_literal(search: Search, stretch: Stretch) -> None:
    """DIP's tree search, with its own memory rule and a program for every rank of every rollout."""
    if isinstance(search, RolloutSearch):
        search.chooser = ProgramChooser(search.chooser.graph, search.chooser.params)
    try_first(search)
    if search.limited:
        search.rule = codes.FITS
    mcts_sequence(search, stretch)


def standstills(graph: TaskGraph, orders: int, seed: int) -> int:
    """Return how many random orders deadlock under the papers' memory rule with minimum-memory candidates."""
    search = Search(graph.with_candidates(minimum_memory(graph)), begin(Budget(evaluations=1)))
    if not search.limited:
        return 0
    sequences, choice = Sequences(search), published_choice(search)
    choice[codes.RULE] = codes.FITS
    random = np.random.default_rng(seed)
    return sum(search.play(sequences.order(random.permutation(sequences.chain)), choice) < 0 for _ in range(orders))
