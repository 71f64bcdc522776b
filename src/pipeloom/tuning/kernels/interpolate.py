"""Interpolation of cost tables at many workloads."""

from __future__ import annotations

from pipeloom.compiled import Array, kernel


@kernel
def interpolate(
    nodes: Array,
    mean_length: Array,
    values: Array,
    per_instance: Array,
    instances: Array,
    tokens: Array,
    pairs: Array,
    out: Array,
) -> None:
    """Interpolate several `pipeloom.tuning.CostTable` of one grid linearly at many workloads; extrapolate beyond it.

    Parameters
    ----------
    nodes : array, shape (num_nodes,)
    mean_length : array, shape (num_nodes, num_lengths)
    values : array, shape (num_tables, num_rows, num_nodes, num_lengths)
    per_instance : array, shape (num_tables, num_rows)
    instances, tokens, pairs : array, shape (num_workloads,)
    out : array, shape (num_tables, num_rows, num_workloads)
        Receives the costs. Empty workloads cost nothing.
    """
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
        length = pairs[w] / tokens[w]
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
                value = lower + share * (upper - lower) + per_instance[table, row] * instances[w]
                out[table, row, w] = max(0.0, value)


@kernel
def _column(mean_length: Array, node: int, length: float) -> int:
    column = 0
    while column < mean_length.shape[1] - 2 and mean_length[node, column + 1] < length:
        column += 1
    return column
