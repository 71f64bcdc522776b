"""Costs of workloads from tables, and their sizes in one pass over the sequences of a batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.compiled import Array, allocating, kernel


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


@kernel
def sum_sizes(length: Array, owner: Array, home: Array, sums: Features) -> None:
    """Sum sequences by group of samples. Sequence k belongs to sample ``owner[k]``, and sample i to ``home[i]``."""
    for k in range(len(length)):
        group = home[owner[k]]
        size = float(length[k])
        sums.instances[group] += 1.0
        sums.tokens[group] += size
        sums.pairs[group] += size * size


@allocating
def count_parts(owner: Array, bin_of: Array, limit: int, counts: Array) -> Array:
    """Write the number of instances of every microbatch into ``counts``; return where its encoder parts begin.

    A part has at most ``limit`` instances. 0: one part per microbatch.
    """
    for k in range(len(owner)):
        counts[bin_of[owner[k]]] += 1
    start = np.zeros(len(counts) + 1, np.int64)
    for m in range(len(counts)):
        parts = 0
        if counts[m] > 0:
            parts = 1 if limit == 0 else -(-counts[m] // limit)
        start[m + 1] = start[m] + parts
    return start


@allocating
def sum_parts(length: Array, owner: Array, bin_of: Array, counts: Array, start: Array, sums: Features) -> None:
    """Sum instances by encoder part. The parts are those of `pipeloom.packing.pack`.

    If the instances of a microbatch do not divide evenly, its first parts have one instance more than the others.
    """
    seen = np.zeros(len(counts), np.int64)
    for k in range(len(length)):
        m = bin_of[owner[k]]
        parts = start[m + 1] - start[m]
        small = counts[m] // parts
        large = counts[m] - small * parts
        place = seen[m]
        seen[m] += 1
        edge = large * (small + 1)
        part = place // (small + 1) if place < edge else large + (place - edge) // small
        size = float(length[k])
        sums.instances[start[m] + part] += 1.0
        sums.tokens[start[m] + part] += size
        sums.pairs[start[m] + part] += size * size


@kernel
def interpolate(
    nodes: Array, mean_length: Array, values: Array, per_instance: Array, features: Features, out: Array
) -> None:
    """Interpolate a `pipeloom.tuning.CostTable` linearly at many workloads; extrapolate beyond it.

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
