"""A candidate of the joint search as one array, and how its chunks are cut and joined.

The array ``plan`` has shape (NUM_ROWS, most chunks + 1).
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.compiled import kernel

Array = npt.NDArray[Any]

FIRST, RANK, KEY, WAIT, LIMIT, SCALARS, NUM_ROWS = 0, 1, 2, 5, 8, 9, 10
"""Rows of a plan: first layer and rank of every chunk, three rows of keys (F, B or I, W), three of waiting
tolerances, most microbatches in flight, and scalars: number of chunks, how many microbatches take turns, and how many
sixteenths of a lone microbatch's times the keys of F and B or I get added."""
NUM_CHUNKS, PERIOD, SPREAD, NUM_SCALARS = 0, 1, 2, 3
UNLIMITED = 2**60
"""A limit of what is in flight that is none."""


@kernel
def copy_plan(source: Array, target: Array) -> None:
    """Copy what a plan uses of its array."""
    num = source[SCALARS, NUM_CHUNKS]
    for k in range(SCALARS):
        for i in range(num + 1):
            target[k, i] = source[k, i]
    for i in range(NUM_SCALARS):
        target[SCALARS, i] = source[SCALARS, i]


@kernel
def split_chunk(plan: Array, c: int, at: int, rank: int) -> None:
    """Cut chunk ``c`` before layer ``at``; the second part goes to ``rank``, and stands beside in all orders."""
    num = plan[SCALARS, NUM_CHUNKS]
    for k in range(FIRST, SCALARS):
        for i in range(num, c, -1):
            plan[k, i + 1] = plan[k, i]
        plan[k, c + 1] = plan[k, c]
    plan[FIRST, c + 1] = at
    plan[RANK, c + 1] = rank
    plan[SCALARS, NUM_CHUNKS] = num + 1


@kernel
def merge_chunk(plan: Array, c: int) -> None:
    """Join chunk ``c + 1`` to chunk ``c``."""
    num = plan[SCALARS, NUM_CHUNKS]
    for k in range(FIRST, SCALARS):
        for i in range(c + 1, num):
            plan[k, i] = plan[k, i + 1]
    plan[SCALARS, NUM_CHUNKS] = num - 1
