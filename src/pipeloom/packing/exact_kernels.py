"""Compiled branch and bound for the packing with the provably lightest heaviest bin."""

from __future__ import annotations

import numpy as np

from pipeloom.compiled import Array, allocating

MOST_STEPS = 4_000_000_000
"""Most inspections of a bin; they take some seconds."""


@allocating
def branch_and_bound(
    order: Array, tokens: Array, load: Array, budget: int, num_bins: int, bound: float, max_nodes: int, bin_of: Array
) -> tuple[float, bool]:
    """Lower the heaviest of ``num_bins`` bins to its optimum, depth first; return it and whether it is proved optimal.

    ``bin_of`` holds an initial solution and is overwritten by better ones. Bins with equal load and tokens are
    interchangeable. Search ends at the lower bound ``bound``, or after ``max_nodes`` nodes or `MOST_STEPS` steps.
    """
    n = len(order)
    height = np.zeros(num_bins, np.float64)
    used = np.zeros(num_bins, np.int64)
    for i in range(n):
        height[bin_of[i]] += load[i]
    best = height.max()
    height[:] = 0.0
    choice = np.full(n, -1, np.int64)
    depth = 0
    nodes = 0
    steps = 0
    while depth >= 0:
        if best <= bound * (1 + 1e-12):
            return best, True
        i = order[depth]
        previous = choice[depth]
        if previous >= 0:
            height[previous] -= load[i]
            used[previous] -= tokens[i]
        placed = False
        for b in range(previous + 1, num_bins):
            steps += 1
            if used[b] + tokens[i] > budget or height[b] + load[i] >= best * (1 - 1e-12):
                continue
            same = False
            for c in range(b):
                steps += 1
                if height[c] == height[b] and used[c] == used[b]:
                    same = True
                    break
            if same:
                continue
            choice[depth] = b
            height[b] += load[i]
            used[b] += tokens[i]
            placed = True
            break
        if steps > MOST_STEPS:
            return best, False
        if not placed:
            choice[depth] = -1
            depth -= 1
            continue
        nodes += 1
        if nodes > max_nodes:
            return best, False
        if depth == n - 1:
            best = height.max()
            for k in range(n):
                bin_of[order[k]] = choice[k]
            # The next visit of this depth removes the last sample again.
            continue
        depth += 1
        choice[depth] = -1
    return best, True


def compile_kernels() -> None:
    """Compile the branch and bound."""
    one = np.ones(2, np.int64)
    branch_and_bound(np.arange(2), one, np.ones(2), 2, 2, 1.0, 9, np.zeros(2, np.int64))
