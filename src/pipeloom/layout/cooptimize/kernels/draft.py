"""A layer chain as arrays that the kernels read, and a candidate solution as arrays that they change in place."""

from __future__ import annotations

from typing import NamedTuple

from pipeloom.compiled import Array, callee

FIRST, RANK, KEY, WAIT, LIMIT, SCALARS, NUM_ROWS = 0, 1, 2, 5, 8, 9, 10
"""Rows of `Draft.chunks`: first layer and rank of every chunk, three rows of keys (F, B or I, W), three rows of waiting
tolerances (F, B or I, W), the maximum number of microbatches in flight, and scalars."""
NUM_CHUNKS, PERIOD, SPREAD, NUM_SCALARS = 0, 1, 2, 3
"""Places in the row of scalars: the number of chunks; the number of microbatches that take turns; and the spread, which
is how many sixteenths of the times of a lone microbatch are added to the keys of F and of B or I."""
UNLIMITED = 2**60
"""Value of `LIMIT` that does not limit the number of microbatches in flight."""


class ChainArrays(NamedTuple):
    """Fields of a `LayerChain` that the kernels read, and ``most_chunks``, the maximum number of chunks.

    ``num_strategies`` has the number of strategies of every layer.
    """

    forward_ns: Array
    backward_ns: Array
    weight_ns: Array
    activation_bytes: Array
    gradient_bytes: Array
    num_strategies: Array
    static_bytes: Array
    end_ns: Array
    capacity_bytes: Array
    num_microbatches: int
    delay_ns: int
    stride_ns: int
    most_chunks: int


class Draft(NamedTuple):
    """A candidate solution.

    Attributes
    ----------
    chunks : array, shape (NUM_ROWS, at least most_chunks + 1)
        Partition, placement and priority rule.
    strategy : array, shape (num_layers,)
        Index of the strategy of every layer.
    """

    chunks: Array
    strategy: Array


@callee
def copy_chunks(source: Array, target: Array) -> None:
    """Copy the used part of `Draft.chunks`."""
    num = source[SCALARS, NUM_CHUNKS]
    for k in range(SCALARS):
        for i in range(num + 1):
            target[k, i] = source[k, i]
    for i in range(NUM_SCALARS):
        target[SCALARS, i] = source[SCALARS, i]


@callee
def copy_rows(source: Array, target: Array, num: int) -> None:
    """Copy the first rows. Whole-array assignments test shapes and take long to compile."""
    for k in range(num):
        for i in range(source.shape[1]):
            target[k, i] = source[k, i]


@callee
def split_chunk(chunks: Array, c: int, at: int, rank: int) -> None:
    """Cut chunk ``c`` before layer ``at``. The second part goes to ``rank`` and inherits keys, tolerances and limit."""
    num = chunks[SCALARS, NUM_CHUNKS]
    for k in range(FIRST, SCALARS):
        for i in range(num, c, -1):
            chunks[k, i + 1] = chunks[k, i]
        chunks[k, c + 1] = chunks[k, c]
    chunks[FIRST, c + 1] = at
    chunks[RANK, c + 1] = rank
    chunks[SCALARS, NUM_CHUNKS] = num + 1


@callee
def merge_chunk(chunks: Array, c: int) -> None:
    """Join chunk ``c + 1`` to chunk ``c``."""
    num = chunks[SCALARS, NUM_CHUNKS]
    for k in range(FIRST, SCALARS):
        for i in range(c + 1, num):
            chunks[k, i] = chunks[k, i + 1]
    chunks[SCALARS, NUM_CHUNKS] = num - 1
