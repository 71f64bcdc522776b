"""Unguided searches that the papers compare with: random, depth first; and the worst schedule."""

from __future__ import annotations

import numpy as np

from pipeloom.search.budget import Stretch
from pipeloom.search.state import Search
from pipeloom.taskgraph import IntArray
from pipeloom_lab.solvers.sequences import Sequences, published_choice, try_first

MOST_REFUSED = 100
"""Orders that may fit under no strategies, before an answer is given up on once the budget is spent."""


def random_search(search: Search, stretch: Stretch) -> None:
    """Try uniformly random sequences."""
    try_first(search)
    sequences, choice = Sequences(search), published_choice(search)
    while search.meter.spent < stretch.until and search.round_size():
        search.try_order(sequences.order(search.random.permutation(sequences.chain)), choice)


def depth_first(search: Search, stretch: Stretch) -> None:
    """Try sequences in lexicographic order from first in, first out; the last places change first."""
    try_first(search)
    sequences, choice = Sequences(search), published_choice(search)
    # Ranks of the chains in the order of their first appearance, so that the default sequence is the first.
    sequence = sequences.default
    rank = np.empty(len(sequences.chain_size), np.int64)
    appearance = sequence[np.sort(np.unique(sequence, return_index=True)[1])]
    rank[appearance] = np.arange(len(rank))
    current = rank[sequence]
    while search.meter.spent < stretch.until and search.round_size():
        search.try_order(sequences.order(appearance[current]), choice)
        if not next_permutation(current):
            return


def next_permutation(values: IntArray) -> bool:
    """Change to the next sequence in lexicographic order; return False after the last one."""
    falls = np.flatnonzero(values[:-1] < values[1:])
    if not falls.size:
        return False
    i = int(falls[-1])
    j = i + 1 + int(np.flatnonzero(values[i + 1 :] > values[i])[-1])
    values[i], values[j] = values[j], values[i]
    values[i + 1 :] = values[i + 1 :][::-1].copy()
    return True


def worst(search: Search, stretch: Stretch) -> None:
    """Search for the longest schedule that any order gives (DIP §7.3).

    Random sequences, and changes of the longest one found; the answer is not an incumbent to improve on.
    """
    sequences, choice = Sequences(search), published_choice(search)
    longest, at_best = -1, sequences.default
    turn = 0
    while (longest < 0 and turn < MOST_REFUSED) or (search.meter.spent < stretch.until and search.meter.left(1)):
        sequence = at_best.copy()
        if turn % 4 == 3:
            sequence = search.random.permutation(sequence)
        elif turn:
            a, b = search.random.integers(0, len(sequence), size=2)
            sequence[a], sequence[b] = sequence[b], sequence[a]
        turn += 1
        search.meter.used += 1
        makespan = search.play(sequences.order(sequence), choice)
        if makespan > longest:
            longest, at_best = makespan, sequence
            search.keep(makespan, search.scratch.sequence)
