"""Annealing of one candidate."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.arrange.kernels.evaluate import evaluate
from pipeloom.arrange.kernels.moves import change
from pipeloom.arrange.kernels.plan import copy_plan
from pipeloom.compiled import kernel
from pipeloom.compiled.random import below, uniform

Array = npt.NDArray[Any]


@kernel
def anneal(
    plan: Array, strategy: Array, best_plan: Array, best_strategy: Array, values: Array, layers: Array,
    num_strategies: Array, statics: Array, room: Array, num_microbatches: int, delay: int, stride: int,
    most_chunks: int, target: int, hot: float, cold: float, steps: int, weights: Array, rng: Array, trial: Array,
    trial_strategy: Array, ints: Array, end: Array, counts: Array,
) -> int:  # fmt: skip
    """Anneal a plan for some proposals, from temperature ``hot`` to ``cold`` in ns; return how many were run.

    ``values`` holds the makespans of the plan and of the best one. Stops at ``target``. ``counts`` (3, NUM_MOVES)
    counts proposals, acceptances and new bests of every move.
    """
    none = np.empty(0, np.int64)
    several = 0
    for layer in range(len(num_strategies)):
        several = max(several, num_strategies[layer])
    runs = 0
    heat = hot
    factor = (cold / hot) ** (1.0 / steps)
    for _ in range(steps):
        heat *= factor
        if values[1] <= target:
            break
        copy_plan(plan, trial)
        given = (
            num_strategies, layers, len(room), most_chunks, num_microbatches, delay, stride, values[0], weights, rng
        )  # fmt: skip
        if several > 1:
            trial_strategy[:] = strategy
        move = change(trial, trial_strategy, *given)
        if move < 0:
            continue
        if below(rng, 8) == 0:
            change(trial, trial_strategy, *given)
        counts[0, move] += 1
        cutoff = values[0] + np.int64(-heat * np.log(uniform(rng))) + 1
        runs += 1
        value = evaluate(
            trial, layers, trial_strategy, statics, room, num_microbatches, delay, stride, cutoff, ints, end, none
        )  # fmt: skip
        if value >= cutoff:
            continue
        counts[1, move] += 1
        values[0] = value
        copy_plan(trial, plan)
        strategy[:] = trial_strategy
        if value < values[1]:
            counts[2, move] += 1
            values[1] = value
            best_plan[:] = plan
            best_strategy[:] = strategy
    return runs
