"""Trees over bins for the compiled loops of packing: scans over all bins in logarithmic time.

Node 1 is the root. The children of node n are 2n and 2n + 1. The second half of an array holds the bins.
"""

from __future__ import annotations

import numpy as np

from pipeloom.compiled import Array, kernel


@kernel
def width(count: int) -> int:
    """Return the smallest power of two that is at least ``count``: half the length of a tree of that many bins."""
    size = 1
    while size < count:
        size *= 2
    return size


@kernel
def put(tree: Array, b: int, value: float) -> None:
    """Set the value of a bin in a tree of maxima."""
    node = len(tree) // 2 + b
    tree[node] = value
    node //= 2
    while node:
        tree[node] = max(tree[2 * node], tree[2 * node + 1])
        node //= 2


@kernel
def first_of_most(tree: Array) -> int:
    """Return the first bin that has the largest value."""
    size, node = len(tree) // 2, 1
    while node < size:
        node = 2 * node + (tree[2 * node] < tree[2 * node + 1])
    return node - size


@kernel
def first_with(tree: Array, least: int) -> int:
    """Return the first bin whose value is at least ``least``, or -1."""
    size, node = len(tree) // 2, 1
    if tree[1] < least:
        return -1
    while node < size:
        node = 2 * node + (tree[2 * node] < least)
    return node - size


@kernel
def add_to(low: Array, b: int, loads: Array, i: int) -> None:
    """Add a sample's loads to a bin in trees of minima, one tree for each dimension."""
    node = low.shape[1] // 2 + b
    for d in range(low.shape[0]):
        low[d, node] += loads[d, i]
    node //= 2
    while node:
        for d in range(low.shape[0]):
            low[d, node] = min(low[d, 2 * node], low[d, 2 * node + 1])
        node //= 2


@kernel
def _height_with(low: Array, node: int, loads: Array, i: int) -> float:
    """Return a lower bound on the height, with a sample added, of the bins below a node; it is exact at a bin."""
    top = 0.0
    for d in range(low.shape[0]):
        top = max(top, low[d, node] + loads[d, i])
    return top


@kernel
def lowest_with(free: Array, low: Array, tokens: int, loads: Array, i: int, stack: Array) -> int:
    """Return the first of the bins that fit a sample and are lowest with it, or -1.

    ``free`` is a tree of maxima of free tokens, ``low`` has trees of minima; ``stack`` holds 128 nodes.
    """
    size = len(free) // 2
    least, place = np.inf, -1
    stack[0], depth = 1, 1
    while depth:
        depth -= 1
        node = stack[depth]
        if free[node] < tokens:
            continue
        bound = _height_with(low, node, loads, i)
        if bound > least:
            continue
        if bound == least:
            first = node
            while first < size:
                first *= 2
            if first - size > place:
                continue
        if node >= size:
            least, place = bound, node - size
            continue
        # The lower child is pushed last, so that it is visited first.
        left = _height_with(low, 2 * node, loads, i) <= _height_with(low, 2 * node + 1, loads, i)
        stack[depth] = 2 * node + left
        stack[depth + 1] = 2 * node + 1 - left
        depth += 2
    return place
