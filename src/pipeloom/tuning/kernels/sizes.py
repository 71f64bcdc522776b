"""Sizes of groups of samples and of encoder parts, in one pass over the sequences of a batch."""

from __future__ import annotations

import numpy as np

from pipeloom.compiled import Array, allocating, kernel


@kernel
def sum_sizes(length: Array, owner: Array, home: Array, instances: Array, tokens: Array, pairs: Array) -> None:
    """Sum sequences by group of samples. Sequence k belongs to sample ``owner[k]``, and sample i to ``home[i]``."""
    for k in range(len(length)):
        group = home[owner[k]]
        size = float(length[k])
        instances[group] += 1.0
        tokens[group] += size
        pairs[group] += size * size


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
def sum_parts(
    length: Array,
    owner: Array,
    bin_of: Array,
    counts: Array,
    start: Array,
    instances: Array,
    tokens: Array,
    pairs: Array,
) -> None:
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
        instances[start[m] + part] += 1.0
        tokens[start[m] + part] += size
        pairs[start[m] + part] += size * size
