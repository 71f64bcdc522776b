"""Arrays of the choice of memory strategies: candidates, what one rank's choice reads, and what it writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt

Array = npt.NDArray[Any]

FORWARD_PART, BACKWARD_PART, WEIGHT_PART = range(3)
"""Columns of ``Tables.tasks`` and of the last axis of ``Tables.parts``: F, B or I, W."""
BEGIN, GRADIENT, END = range(3)
"""Columns of spans, which are places in a rank's order: a pair holds its activations from ``BEGIN`` to ``GRADIENT``,
both included, and from there to ``END`` what its weight gradient needs."""


class Tables(NamedTuple):
    """Candidates of all pairs, sorted by rank, and the parts of the graph that the choice reads.

    Attributes
    ----------
    pair : array, shape (num_pairs,)
        The graph's number of every row.
    rank_start : array, shape (num_ranks + 1,)
        Rows of rank r: ``rank_start[r]`` to ``rank_start[r + 1]``.
    time, activation, gradient : array, shape (num_pairs, num_options)
        Total nanoseconds; bytes until the end of B or I; bytes from there to the end of W.
    parts : array, shape (num_pairs, num_options, 3)
        Nanoseconds of F, of B or I, and of W.
    lean : array, shape (num_pairs,)
    tasks : array, shape (num_pairs, 3)
        F, B or I, W; -1 where there is none.
    capacity : array, shape (num_ranks,)
    host : array, shape (num_pairs, num_options)
        Bytes on the host until the end of B or I.
    host_capacity : array, shape (num_ranks,)
        -1: no limit.
    staging : array, shape (num_ranks,)
        Taken off the capacity where a pair offloads.
    stays : array, shape (num_ranks,)
        Whether a rank stages something, and every pair of it can keep off the host.
    staying : array, shape (num_pairs, num_options)
        Candidates that keep off the host: those that do not are replaced by one that does. Where nothing is staged, of
        no rows; and so are the next.
    staying_time, staying_activation, staying_gradient : array, shape (num_pairs, num_options)
        Of these.
    edge_rank, edge_source, edge_target, edge_bytes : array
        Edges that hold bytes.
    rank, duration : array, shape (num_tasks,)
        Durations under no choice in particular.
    predecessor_start, predecessor, predecessor_delay : array
    """

    pair: Array
    rank_start: Array
    time: Array
    activation: Array
    gradient: Array
    parts: Array
    lean: Array
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
    rank: Array
    duration: Array
    predecessor_start: Array
    predecessor: Array
    predecessor_delay: Array


class Workspace(NamedTuple):
    """Arrays that choices write, for all ranks; one set per thread."""

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
    spare: Array
    sums: Array
    duration: Array
    end: Array
    free_at: Array


class Options(NamedTuple):
    """Arrays that the choice for the pairs of one rank reads.

    Attributes
    ----------
    time, activation, gradient : array, shape (num_pairs, num_options)
        As in `Tables`.
    lean : array, shape (num_pairs,)
        Candidates that hold the least; a choice of these fits.
    span : array, shape (num_pairs, 3)
        Columns as above.
    capacity : array, shape (num_places,)
        Most bytes that the pairs may hold at each place; where the host has a limit, the same for it follows, place by
        place.
    host : array, shape (num_pairs, num_options)
    host_begin : int
        Place from which ``capacity`` is the host's.
    """

    time: Array
    activation: Array
    gradient: Array
    lean: Array
    span: Array
    capacity: Array
    host: Array
    host_begin: int


class Work(NamedTuple):
    """Arrays that the choice for the pairs of one rank writes.

    Attributes
    ----------
    best, trial : array, shape (num_pairs,)
        The best choice so far, and one that is tried.
    allocated, multiplier, running : array, shape (num_places + 1,)
        Bytes held under a choice, price of a byte, sum of the prices before, at every place.
    price, host_price, gain, move : array, shape (num_pairs,)
        Scratch.
    spare : array, shape (9,)
        Scratch.
    sums : array, shape (3, most sums)
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
    spare: Array
    sums: Array


class Ascent(NamedTuple):
    """How thorough the Lagrangian method is; see `pipeloom.search.params.StrategyParams`."""

    rounds: int
    thorough_rounds: int
    repair_every: int
    first_step: float
    later_step: float
    most_sum_steps: int
