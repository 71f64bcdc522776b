"""Settings of every local search: temperature, length, target and state."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import callee
from pipeloom.compiled.random import fraction

Array = npt.NDArray[Any]


class Terms(NamedTuple):
    """The length of a local search, and how much worse a change may be.

    Attributes
    ----------
    temperature : float
        A change is kept if it is no worse than the current makespan by more than this times an exponential variate,
        which is drawn first so that the evaluation can stop early; 0: nothing worse.
    target : int
        Makespan at which to stop.
    num_evaluations : int
    """

    temperature: float
    target: int
    num_evaluations: int


class Moves(NamedTuple):
    """Which changes of a group order are made: one in so many of the policy, of sixteen so many of microbatches."""

    switch_every: int
    whole_microbatches: int


class Walk(NamedTuple):
    """The state of a local search of group orders.

    Attributes
    ----------
    order, choice : array
        The current one.
    best_order, best_choice : array
    state : array, shape (2,)
        The current and the best makespan.
    random : array, shape (1,)
        State of the random numbers.
    """

    order: Array
    choice: Array
    best_order: Array
    best_choice: Array
    state: Array
    random: Array


@callee
def allowance(terms: Terms, random: Array) -> Any:
    """Draw how much longer than the current makespan a changed schedule may be."""
    if terms.temperature > 0.0:
        return np.int64(-np.log(fraction(random)) * terms.temperature)
    return np.int64(0)
