"""Settings of every local search: temperature, length, target and state."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import callee
from pipeloom.compiled.random import fraction

Array = npt.NDArray[Any]


class Terms(NamedTuple):
    """The length of a local search and the accepted increase of the makespan.

    Attributes
    ----------
    temperature : float
        A change is accepted if it increases the makespan by at most this temperature, in ns, times an exponential
        variate. The variate is drawn first so that the evaluation can stop early. 0: no increase.
    target : int
        Makespan at which to stop, in ns.
    num_evaluations : int
        Maximum number of evaluations.
    """

    temperature: float
    target: int
    num_evaluations: int


class Moves(NamedTuple):
    """Frequencies of changes of a group order.

    Attributes
    ----------
    switch_every : int
        One in this many changes concerns the policy. 0: none.
    whole_microbatches : int
        This many sixteenths of the other changes concern whole microbatches.
    """

    switch_every: int
    whole_microbatches: int


class Walk(NamedTuple):
    """The state of a local search of group orders.

    Attributes
    ----------
    order, choice : array
        The current order and choice.
    best_order, best_choice : array
        The best order and choice.
    state : array, shape (2,)
        The current and the best makespan, in ns.
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
