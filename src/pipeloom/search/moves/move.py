"""What all moves have in common: weights, and counts of how often each was tried and improved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pipeloom.compiled import Array, callee
from pipeloom.compiled.random import draw

TRIED, IMPROVED = range(2)
"""Columns of ``Tally.counts``."""


class Move:
    """A move of local search, as a class without instances.

    Attributes
    ----------
    name : str
        Name in reports.
    weight : int
        Relative frequency among the moves of its list.
    propose : callable
        Compiled function (`pipeloom.compiled.callee`) that changes the schedule that it gets, in place.
    """

    name: ClassVar[str]
    weight: ClassVar[int]
    propose: ClassVar[Any]


class Tally(NamedTuple):
    """Weights of the moves of a list, and how often each was tried and made the current schedule shorter, int64.

    ``counts`` has shape (num_moves, 2).
    """

    weights: Array
    counts: Array


def require_valid(moves: Sequence[type[Move]]) -> None:
    """Raise `TypeError` if a move has no name, the name of another one, or a weight that is no count."""
    names = set()
    for move in moves:
        name, weight = getattr(move, "name", None), getattr(move, "weight", None)
        if not isinstance(name, str) or name in names:
            raise TypeError(f"{move.__name__}.name is {name!r}, but must be a string that no other move has")
        if not isinstance(weight, int) or weight < 0:
            raise TypeError(f"{move.__name__}.weight is {weight!r}, but must be an integer of at least 0")
        names.add(name)


def make_tally(moves: Sequence[type[Move]]) -> Tally:
    """Return the weights of moves, and counts of 0."""
    return Tally(np.array([move.weight for move in moves], np.int64), np.zeros((len(moves), 2), np.int64))


@callee
def draw_move(tally: Tally, random: Array) -> Any:
    """Draw the number of a move by weight, and count it as tried."""
    total = 0
    for weight in tally.weights:
        total += weight
    left = draw(random) % total
    which = 0
    while left >= tally.weights[which]:
        left -= tally.weights[which]
        which += 1
    tally.counts[which, TRIED] += 1
    return which
