"""Costs of workloads from tables, and their sizes in one pass over the sequences of a batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.compiled import Array, allocating, inlined, kernel


class Features(NamedTuple):
    """Sizes of several workloads.

    Attributes
    ----------
    instances, tokens, pairs : array, shape (num_workloads,)
        Number of sequences, sum of their lengths, and sum of their squared lengths.
    """

    instances: Array
    tokens: Array
    pairs: Array


@inlined
def _add(sums: Features, k: int, length: int) -> None:
    size = float(length)
    sums.instances[k] += 1.0
    sums.tokens[k] += size
    sums.pairs[k] += size * size


@allocating
def sum_sizes(length: Array, owner: Array, home: Array, num: int) -> Features:
    """Sum sequences by group of samples. Sequence k belongs to sample ``owner[k]``, and sample i to ``home[i]``."""
    sums = Features(np.zeros(num), np.zeros(num), np.zeros(num))
    for k in range(len(length)):
        _add(sums, home[owner[k]], length[k])
    return sums


@allocating
def sum_parts(length: Array, owner: Array, bin_of: Array, num: int, limit: int) -> tuple[Array, Features]:
    """Return where the encoder parts of each of ``num`` microbatches begin, and the sizes of all parts.

    A part has at most ``limit`` instances. 0: one part per microbatch. The parts are those of `pipeloom.packing.pack`:
    if the instances of a microbatch do not divide evenly, its first parts have one instance more than the others.
    """
    counts, seen, start = np.zeros(num, np.int64), np.zeros(num, np.int64), np.zeros(num + 1, np.int64)
    for k in range(len(owner)):
        counts[bin_of[owner[k]]] += 1
    for m in range(num):
        parts = 0
        if counts[m] > 0:
            parts = 1 if limit == 0 else -(-counts[m] // limit)
        start[m + 1] = start[m] + parts
    sums = Features(np.zeros(start[num]), np.zeros(start[num]), np.zeros(start[num]))
    for k in range(len(length)):
        m = bin_of[owner[k]]
        parts = start[m + 1] - start[m]
        small = counts[m] // parts
        large = counts[m] - small * parts
        place = seen[m]
        seen[m] += 1
        edge = large * (small + 1)
        part = place // (small + 1) if place < edge else large + (place - edge) // small
        _add(sums, start[m] + part, length[k])
    return start, sums


@kernel
def interpolate(
    nodes: Array, mean_length: Array, values: Array, per_instance: Array, features: Features, out: Array
) -> None:
    """Interpolate a `pipeloom.tuning.table.CostTable` linearly at many workloads; extrapolate beyond it.

    ``out`` receives the costs, shape (num_chunks, num_rows, num_workloads). Empty workloads cost nothing.
    """
    tokens = features.tokens
    num_tables, num_rows = per_instance.shape
    num_nodes = len(nodes)
    for w in range(len(tokens)):
        if tokens[w] <= 0:
            for table in range(num_tables):
                for row in range(num_rows):
                    out[table, row, w] = 0.0
            continue
        low = 0
        high = num_nodes - 1
        while high - low > 1:
            middle = (low + high) // 2
            if nodes[middle] <= tokens[w]:
                low = middle
            else:
                high = middle
        length = features.pairs[w] / tokens[w]
        share = (tokens[w] - nodes[low]) / (nodes[low + 1] - nodes[low])
        left = _column(mean_length, low, length)
        right = _column(mean_length, low + 1, length)
        along = (length - mean_length[low, left]) / (mean_length[low, left + 1] - mean_length[low, left])
        across = (length - mean_length[low + 1, right]) / (
            mean_length[low + 1, right + 1] - mean_length[low + 1, right]
        )
        for table in range(num_tables):
            for row in range(num_rows):
                lower, upper = values[table, row, low, left], values[table, row, low + 1, right]
                lower += along * (values[table, row, low, left + 1] - lower)
                upper += across * (values[table, row, low + 1, right + 1] - upper)
                value = lower + share * (upper - lower) + per_instance[table, row] * features.instances[w]
                out[table, row, w] = max(0.0, value)


@kernel
def _column(mean_length: Array, node: int, length: float) -> int:
    column = 0
    while column < mean_length.shape[1] - 2 and mean_length[node, column + 1] < length:
        column += 1
    return column
