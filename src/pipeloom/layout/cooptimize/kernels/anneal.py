"""Annealing of one candidate."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.compiled import Array, allocating
from pipeloom.compiled.arrays import assign
from pipeloom.compiled.random import below, uniform
from pipeloom.layout.cooptimize.kernels.draft import NUM_ROWS, Draft, copy_chunks, copy_rows
from pipeloom.layout.cooptimize.kernels.evaluate import Scratch, evaluate
from pipeloom.layout.cooptimize.kernels.move_table import change
from pipeloom.layout.cooptimize.kernels.moves import BEST, PRESENT, MoveContext

PROPOSED, ACCEPTED, NEW_BEST = 0, 1, 2
"""Rows of `WalkArrays.counts`."""


class WalkArrays(NamedTuple):
    """Arrays that annealing changes.

    Attributes
    ----------
    present, best, trial : Draft
        The current draft, the best draft, and scratch. `MoveContext.values` holds the makespans of the first two.
    weights : array, shape (num_moves,)
        Cumulative sums of the weights of the moves.
    counts : array, shape (3, num_moves)
        How often each move was proposed, was accepted, and gave a new best draft.
    """

    present: Draft
    best: Draft
    trial: Draft
    weights: Array
    counts: Array


class Cooling(NamedTuple):
    """Number of proposals, and the temperatures of the first and the last proposal, in ns."""

    steps: int
    hot: float
    cold: float


@allocating
def anneal(walk: WalkArrays, context: MoveContext, scratch: Scratch, cooling: Cooling, target: int) -> int:
    """Anneal a draft for ``cooling.steps`` proposals; return how many were run. Stop at makespan ``target``, in ns."""
    trial, present, best = walk.trial, walk.present, walk.best
    values, rng, counts = context.values, context.rng, walk.counts
    none = np.empty(0, np.int64)
    several = 0
    for count in context.chain.num_strategies:
        several = max(several, count)
    runs = 0
    heat = cooling.hot
    factor = (cooling.cold / cooling.hot) ** (1.0 / cooling.steps)
    for _ in range(cooling.steps):
        heat *= factor
        if values[BEST] <= target:
            break
        copy_chunks(present.chunks, trial.chunks)
        if several > 1:
            assign(trial.strategy, present.strategy)
        move = change(trial, context, walk.weights)
        if move < 0:
            continue
        if below(rng, 8) == 0:
            change(trial, context, walk.weights)
        counts[PROPOSED, move] += 1
        cutoff = values[PRESENT] + np.int64(-heat * np.log(uniform(rng))) + 1
        runs += 1
        value = evaluate(trial, context.chain, scratch, cutoff, none)
        if value >= cutoff:
            continue
        counts[ACCEPTED, move] += 1
        values[PRESENT] = value
        copy_chunks(trial.chunks, present.chunks)
        assign(present.strategy, trial.strategy)
        if value < values[BEST]:
            counts[NEW_BEST, move] += 1
            values[BEST] = value
            copy_rows(present.chunks, best.chunks, NUM_ROWS)
            assign(best.strategy, present.strategy)
    return runs
