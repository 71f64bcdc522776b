"""Reading a table of costs at many workloads."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.compiled import kernel

Array = npt.NDArray[Any]


@kernel
def interpolate(
    nodes: Array, mean_length: Array, values: Array, per_instance: Array, instances: Array, tokens: Array, pairs: Array,
    out: Array,
) -> None:  # fmt: skip
    """Read a `pipeloom.tuning.CostTable` at many workloads; linear within its grid and beyond its ends."""
    num_nodes, num_lengths = mean_length.shape
    for w in range(len(tokens)):
        if tokens[w] <= 0:
            continue
        low = 0
        high = num_nodes - 1
        while high - low > 1:
            middle = (low + high) // 2
            if nodes[middle] <= tokens[w]:
                low = middle
            else:
                high = middle
        length = pairs[w] / tokens[w]
        share = (tokens[w] - nodes[low]) / (nodes[low + 1] - nodes[low])
        for side in range(2):
            node = low + side
            column = 0
            while column < num_lengths - 2 and mean_length[node, column + 1] < length:
                column += 1
            left = mean_length[node, column]
            along = (length - left) / (mean_length[node, column + 1] - left)
            weight = share if side == 1 else 1 - share
            for row in range(values.shape[0]):
                first = values[row, node, column]
                out[row, w] += weight * (first + along * (values[row, node, column + 1] - first))
        for row in range(values.shape[0]):
            out[row, w] = max(0.0, out[row, w] + per_instance[row] * instances[w])
