"""Rules, by which a rank takes its next task, and their form as the kernels' plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeloom.arrange.kernels import (
    FIRST,
    KEY,
    LIMIT,
    NUM_CHUNKS,
    NUM_ROWS,
    PERIOD,
    RANK,
    SCALARS,
    SPREAD,
    UNLIMITED,
    WAIT,
)
from pipeloom.arrange.layer_chain import Arrangement
from pipeloom.taskgraph import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """Which task a rank takes next; see ``docs/arrange.md``.

    Attributes
    ----------
    keys : array, shape (3, num_chunks)
        Rows F, B or I, W: the least key goes first.
    waits : array, shape (3, num_chunks)
        How long a rank may wait for a task of the chunk, in ns.
    period : int
        How many microbatches take turns before the next ones come.
    limits : array, shape (num_chunks,), or None
        Most microbatches of a chunk between F and B or I, at least 1; None: as many as memory has room for.
    spread : int
        Keys of F and B or I get so many sixteenths of a lone microbatch's start of F, and of B or I, added: they follow
        when layers move.
    """

    keys: IntArray
    waits: IntArray
    period: int = 1
    limits: IntArray | None = None
    spread: int = 0


def to_plan(arrangement: Arrangement, rule: Rule, most_chunks: int) -> IntArray:
    """Write an arrangement and its rule as the array that the kernels change."""
    num = arrangement.num_chunks
    plan = np.zeros((NUM_ROWS, most_chunks + 2), np.int64)
    plan[FIRST, : num + 1] = arrangement.cuts
    plan[RANK, :num] = arrangement.ranks
    plan[KEY : KEY + 3, :num] = rule.keys
    plan[WAIT : WAIT + 3, :num] = rule.waits
    plan[LIMIT, :num] = UNLIMITED if rule.limits is None else rule.limits
    plan[SCALARS, NUM_CHUNKS] = num
    plan[SCALARS, PERIOD] = rule.period
    plan[SCALARS, SPREAD] = rule.spread
    return plan


def from_plan(plan: IntArray, strategy: IntArray) -> tuple[Arrangement, Rule]:
    """Read a plan back."""
    num = int(plan[SCALARS, NUM_CHUNKS])
    chosen = tuple(int(s) for s in strategy) if strategy.any() else ()
    arrangement = Arrangement(
        tuple(int(x) for x in plan[FIRST, : num + 1]), tuple(int(x) for x in plan[RANK, :num]), chosen
    )
    keys, waits = plan[KEY : KEY + 3, :num].copy(), plan[WAIT : WAIT + 3, :num].copy()
    limits = plan[LIMIT, :num].copy() if plan[LIMIT, :num].min() < UNLIMITED else None
    return arrangement, Rule(keys, waits, int(plan[SCALARS, PERIOD]), limits, int(plan[SCALARS, SPREAD]))
