"""Sizes of the groups and encoder parts that a packing makes, in one pass over a batch's sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import allocating, kernel

Array = npt.NDArray[Any]


@kernel
def sum_sizes(length: Array, owner: Array, home: Array, instances: Array, tokens: Array, pairs: Array) -> None:
    """Add sequences up by the group of their sample: sequence k belongs to group ``home[owner[k]]``."""
    for k in range(len(length)):
        group = home[owner[k]]
        size = float(length[k])
        instances[group] += 1.0
        tokens[group] += size
        pairs[group] += size * size


@allocating
def count_parts(owner: Array, bin_of: Array, limit: int, counts: Array) -> Array:
    """Instances of every microbatch into ``counts``, and where its parts of at most ``limit`` (0: all) begin."""
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
    """Add instances up by encoder part, cut as `pipeloom.packing.pack` cuts them: sizes differ by at most one.

    The first ones of a microbatch have one instance more, where they do not divide evenly.
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
