"""Costs of one packed batch as arrays that the loops of tuning read, and the arrays that they write."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.compiled import Array


class Chain(NamedTuple):
    """Costs of one packed batch: times in ns, sizes in bytes.

    Attributes
    ----------
    forward, backward, activation : array, shape (num_microbatches, num_ranks)
    delay : array, shape (num_microbatches, num_ranks)
        Duration of the message between ranks p and p + 1 in either direction. The last column is 0.
    part_start : array, shape (num_microbatches + 1,)
        Encoder parts of microbatch m are ``part_start[m]`` to ``part_start[m + 1]``.
    part_forward, part_backward, part_bytes, part_output : array, shape (num_parts,)
        ``part_bytes`` holds activations until the end of the backward of the part, or of its forward if it is frozen.
        ``part_output`` holds embeddings until the forward of the backbone has read them.
    static, capacity : array, shape (num_ranks,)
        Static bytes and memory of every rank.
    trained : bool
        Whether encoder parts have backwards.
    """

    forward: Array
    backward: Array
    activation: Array
    delay: Array
    part_start: Array
    part_forward: Array
    part_backward: Array
    part_bytes: Array
    part_output: Array
    static: Array
    capacity: Array
    trained: bool


class Scratch(NamedTuple):
    """Arrays that a run writes: ends of forwards and backwards, events of rank 0, and the memory that rank 0 needs."""

    forward_end: Array
    backward_end: Array
    free: Array
    left: Array
    used: Array
    events: Array
    pending: Array
    needs: Array


def make_scratch(chain: Chain) -> Scratch:
    """Allocate scratch arrays for chains of this size."""
    m, p = chain.forward.shape
    parts = len(chain.part_forward)
    return Scratch(
        np.zeros((m, p), np.int64),
        np.zeros((m, p), np.int64),
        np.zeros(p, np.int64),
        np.zeros(p, np.int64),
        np.zeros(p, np.int64),
        np.zeros((2 * m + 2 * parts + 1, 2), np.int64),
        np.zeros(parts + 1, np.int64),
        np.zeros(m + 1, np.int64),
    )
