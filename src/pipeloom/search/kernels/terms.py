"""Settings of every local search: temperature, length and target."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeloom.compiled import Array, callee
from pipeloom.compiled.random import fraction


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


@callee
def allowance(terms: Terms, random: Array) -> Any:
    """Draw how much longer than the current makespan a changed schedule may be."""
    if terms.temperature > 0.0:
        return np.int64(-np.log(fraction(random)) * terms.temperature)
    return np.int64(0)
