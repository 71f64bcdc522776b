"""What the kernels read of a chain, and a candidate answer as arrays that they change in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt

from pipeloom.compiled import callee

Array = npt.NDArray[Any]

FIRST, RANK, KEY, WAIT, LIMIT, SCALARS, NUM_ROWS = 0, 1, 2, 5, 8, 9, 10
"""Rows of `Draft.chunks`: first layer and rank of every chunk, three rows of keys (F, B or I, W), three of waiting
tolerances, most microbatches in flight, and scalars: number of chunks, how many microbatches take turns, and how many
sixteenths of a lone microbatch's times the keys of F and B or I get added."""
NUM_CHUNKS, PERIOD, SPREAD, NUM_SCALARS = 0, 1, 2, 3
"""Places in the row of scalars."""
UNLIMITED = 2**60
"""A limit of what is in flight that is none."""


class ChainArrays(NamedTuple):
    """A layer chain as the kernels read it.

    Attributes
    ----------
    forward_ns, backward_ns, weight_ns : array, shape (num_layers, num_strategies)
        Of F, of B or I, and of W.
    activation_bytes, gradient_bytes : array, shape (num_layers, num_strategies)
        Held from F to B or I, and from there to W.
    num_strategies, static_bytes, end_ns : array, shape (num_layers,)
        ``end_ns``: added to the end of an iteration, after its rank's last task.
    capacity_bytes : array, shape (num_ranks,)
    num_microbatches : int
    delay_ns : int
        Of a boundary transfer between ranks.
    stride_ns : int
        What a microbatch adds to its keys: the work of one on the mean rank.
    most_chunks : int
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
    """A candidate answer.

    Attributes
    ----------
    chunks : array, shape (NUM_ROWS, at least most_chunks + 1)
        Where the layers lie, and the priority rule.
    strategy : array, shape (num_layers,)
        Index of every layer's strategy.
    """

    chunks: Array
    strategy: Array


@callee
def copy_chunks(source: Array, target: Array) -> None:
    """Copy what is used of `Draft.chunks`."""
    num = source[SCALARS, NUM_CHUNKS]
    for k in range(SCALARS):
        for i in range(num + 1):
            target[k, i] = source[k, i]
    for i in range(NUM_SCALARS):
        target[SCALARS, i] = source[SCALARS, i]


@callee
def copy_rows(source: Array, target: Array, num: int) -> None:
    """Copy the first rows; an assignment to all of an array tests shapes, and so compiles slowly."""
    for k in range(num):
        for i in range(source.shape[1]):
            target[k, i] = source[k, i]


@callee
def clear(numbers: Array) -> None:
    """Make all of them 0."""
    for i in range(len(numbers)):
        numbers[i] = 0


@callee
def split_chunk(chunks: Array, c: int, at: int, rank: int) -> None:
    """Cut chunk ``c`` before layer ``at``; the second part goes to ``rank``, and stands beside in all orders."""
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
