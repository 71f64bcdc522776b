"""Arrays of the choice of memory strategies: all candidates, and the arrays that the choice for one rank reads and
writes.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeloom.compiled import Array

BEGIN, GRADIENT, END = range(3)
"""Columns of spans, which are places in the order of a rank. A pair holds its activations from ``BEGIN`` to
``GRADIENT`` inclusive, and the bytes for its weight gradient from there to ``END``."""


class Tables(NamedTuple):
    """Candidates of all pairs, sorted by rank, and the parts of the graph that the choice reads.

    Attributes
    ----------
    pair : array, shape (num_pairs,)
        Pair of the graph in each row.
    rank_start : array, shape (num_ranks + 1,)
        Rows of rank r are ``rank_start[r]`` to ``rank_start[r + 1]``.
    time, activation, gradient : array, shape (num_pairs, num_options)
        Total time in ns; bytes held until the end of B or I; bytes held from there to the end of W.
    minimum_memory : array, shape (num_pairs,)
        Minimum-memory candidate of each pair.
    tasks : array, shape (num_pairs, 3)
        F, B or I, and W; -1 if the pair has none.
    host : array, shape (num_pairs, num_options)
        Bytes held on the host until the end of B or I.
    host_capacity : array, shape (num_ranks,)
        Capacity of the host in bytes; -1 if it has no limit.
    staging : array, shape (num_ranks,)
        Bytes subtracted from the capacity if a pair offloads.
    stays : array, shape (num_ranks,)
        Whether the rank needs staging memory and all its pairs can stay off the host.
    staying : array, shape (num_pairs, num_options)
        Candidates that stay off the host. A candidate that does not is replaced by one that does. If no rank needs
        staging memory, this field and the next three have no rows.
    staying_time, staying_activation, staying_gradient : array, shape (num_pairs, num_options)
        Times and bytes of these candidates.
    edge_rank, edge_source, edge_target, edge_bytes : array
        Edges that hold bytes.
    """

    pair: Array
    rank_start: Array
    time: Array
    activation: Array
    gradient: Array
    minimum_memory: Array
    tasks: Array
    capacity: Array
    host: Array
    host_capacity: Array
    staging: Array
    stays: Array
    staying: Array
    staying_time: Array
    staying_activation: Array
    staying_gradient: Array
    edge_rank: Array
    edge_source: Array
    edge_target: Array
    edge_bytes: Array


class Workspace(NamedTuple):
    """Arrays that choices write, for all ranks. Each thread has one set."""

    place: Array
    capacity: Array
    allocated: Array
    multiplier: Array
    running: Array
    span: Array
    choice: Array
    other: Array
    trial: Array
    price: Array
    host_price: Array
    gain: Array
    move: Array


class Options(NamedTuple):
    """Arrays that the choice for the pairs of one rank reads.

    Attributes
    ----------
    time, activation, gradient : array, shape (num_pairs, num_options)
        As in `Tables`.
    minimum_memory : array, shape (num_pairs,)
        Minimum-memory candidates, which fit together.
    span : array, shape (num_pairs, 3)
        Columns as above.
    capacity : array, shape (num_places,)
        Maximum number of bytes that the pairs may hold at each place of the rank. If the host has a limit, its maxima
        follow, place by place.
    host_begin : int
        Index from which ``capacity`` is that of the host.
    """

    time: Array
    activation: Array
    gradient: Array
    minimum_memory: Array
    span: Array
    capacity: Array
    host: Array
    host_begin: int


class Work(NamedTuple):
    """Arrays that the choice for the pairs of one rank writes.

    Attributes
    ----------
    best, trial : array, shape (num_pairs,)
        The best choice so far, and the trial choice.
    allocated, multiplier, running : array, shape (num_places + 1,)
        At every place: bytes held under a choice, price of a byte, and sum of the prices of earlier places.
    price, host_price, gain, move : array, shape (num_pairs,)
        Scratch.
    """

    best: Array
    trial: Array
    allocated: Array
    multiplier: Array
    running: Array
    price: Array
    host_price: Array
    gain: Array
    move: Array
