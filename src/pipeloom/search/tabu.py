"""Tabu search on the order of tasks of every rank, from the incumbent (`pipeloom.search.kernels.tabu`)."""

from __future__ import annotations

from functools import partial

import numpy as np

from pipeloom.search.budget import WHOLE, Stretch
from pipeloom.search.kernels import tabu as kernels
from pipeloom.search.kernels.blocks import make_blocks, measure
from pipeloom.search.kernels.by_task import make_ranks
from pipeloom.search.kernels.perturb import make_table
from pipeloom.search.kernels.terms import Terms
from pipeloom.search.local import climb_together
from pipeloom.search.moves import BLOCK_MOVES, START_MOVES
from pipeloom.search.moves.move import make_tally
from pipeloom.search.packed import turn_of_task
from pipeloom.search.state import Search

SWEEPS = 20
"""Number of passes of the windows over the graph after which `TabuParams.patience` has its full value. It starts at one
`SWEEPS`-th."""


class Tour:
    """The tabu search of one thread."""

    moves = (*START_MOVES, *BLOCK_MOVES)

    def __init__(self, search: Search, seed: int) -> None:
        params = search.params.tabu
        # Microbatches move as a whole, even if memory does not matter and all tasks are one component.
        self.component_of_task = turn_of_task(search.graph)
        span = float(search.packed.work.max()) / (int(self.component_of_task.max()) + 1)
        num_tasks = search.graph.num_tasks
        width, sweeps = max(1, round(params.window * search.graph.num_ranks**0.5)), SWEEPS
        if num_tasks <= max(params.most_tasks, width):
            width, sweeps = num_tasks, 1
        patience = max(1, round(params.patience * width**0.5))
        self.rules = kernels.Rules(params.tenure, patience, params.reach, span, width, sweeps)
        self.tally, self.ranks = make_tally(self.moves), make_ranks(search.packed)
        self.random = np.array([seed | 1], np.uint64)
        self.restart(search)

    def restart(self, search: Search) -> None:
        """Continue from the incumbent."""
        self.blocks = make_blocks(search.packed, search.sequence)
        makespan = int(measure(search.packed, self.blocks))
        self.table = make_table(self.blocks, makespan, self.component_of_task, self.random)
        self.tour = kernels.make_tour(self.blocks, makespan, self.rules.width)
        self.state = self.tour.state

    def climb(self, search: Search, terms: Terms) -> int:
        """Make moves that time as many tasks as the given evaluations; return the evaluations used."""
        each = max(1, search.graph.num_tasks // self.rules.width)
        terms = terms._replace(num_evaluations=terms.num_evaluations * each)
        made = kernels.tabu(
            search.packed, self.blocks, self.ranks, self.table, self.tally, self.tour, self.rules, terms
        )
        return max(1, int(made) // each)

    def offer(self, search: Search) -> None:
        """Make the best order the incumbent."""
        # A longest path may lie outside of the window in which the order was found.
        self.state[1] = search.try_sequence(self.tour.best)


def tabu_search(search: Search, stretch: Stretch = WHOLE) -> None:
    """Search the orders of tasks from the incumbent until a part of the budget is spent or the target is reached."""
    if search.done:
        return
    climb_together(search, partial(Tour, search), stretch, search.params.tabu.heat)
