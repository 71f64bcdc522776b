"""Justification: local search that schedules back and forth in time (`pipeloom.search.kernels.perturb`)."""

from __future__ import annotations

from functools import partial

import numpy as np

from pipeloom.search.budget import Stretch
from pipeloom.search.kernels.blocks import make_blocks, measure
from pipeloom.search.kernels.by_task import make_ranks
from pipeloom.search.kernels.perturb import Perturbation, make_table, perturb
from pipeloom.search.kernels.terms import Terms
from pipeloom.search.local import climb_together
from pipeloom.search.moves import START_MOVES
from pipeloom.search.moves.move import make_tally
from pipeloom.search.packed import COMPONENT, PackedGraph
from pipeloom.search.state import Search


class _Justifier:
    """The justification of one thread."""

    moves = START_MOVES

    def __init__(self, search: Search, reverse: PackedGraph, seed: int) -> None:
        self.reverse, self.tally = reverse, make_tally(self.moves)
        self.ranks, self.mirror = make_ranks(search.packed), make_ranks(reverse)
        self.random = np.array([seed | 1], np.uint64)
        params = search.params.justification
        span = float(search.packed.work.max()) / len(search.packed.component_size)
        self.perturbation = Perturbation(span, params.passes, params.lookahead)
        self.restart(search)

    def restart(self, search: Search) -> None:
        """Continue from the incumbent."""
        blocks = make_blocks(search.packed, search.sequence)
        makespan = int(measure(search.packed, blocks))
        component = search.packed.task[:-1, COMPONENT]
        self.table = make_table(blocks, makespan, component, self.random)
        self.state = self.table.state

    def climb(self, search: Search, terms: Terms) -> int:
        """Make about the given number of passes; return how many were made."""
        made = perturb(
            search.packed, self.reverse, self.ranks, self.mirror, self.table, self.tally, self.perturbation, terms
        )
        return int(made)

    def offer(self, search: Search) -> None:
        """Make the best schedule the incumbent. After a reversed pass, its order may be faster when run forwards."""
        makespan = search.try_sequence(self.table.best)
        assert makespan <= self.state[1], (makespan, self.state)
        self.state[1] = makespan


def justify(search: Search, stretch: Stretch, heat: float) -> None:
    """Justify the incumbent of a search that can be reversed until a part of the budget is spent.

    ``heat`` is the initial annealing temperature, in mean task durations. It falls to 0 over the part of the budget.
    """
    reverse = search.reverse
    assert reverse is not None
    climb_together(search, partial(_Justifier, search, reverse), stretch, heat)
