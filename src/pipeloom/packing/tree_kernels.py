"""Trees over bins for the compiled loops of packing: the answers of a scan over all bins, in logarithmic time.

Node 1 is the root, the children of node n are 2n and 2n + 1, and the last half of an array are the bins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import kernel

Array = npt.NDArray[Any]


@kernel
def width(count: int) -> int:
    """Return the least power of two that is no less than a number of bins: half the length of a tree."""
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
    """Add a sample's loads to a bin in trees of minima, one for each dimension."""
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
    """Return a height that no bin below a node is lower than with a sample; that of a bin is exact."""
    top = 0.0
    for d in range(low.shape[0]):
        top = max(top, low[d, node] + loads[d, i])
    return top


@kernel
def lowest_with(room: Array, low: Array, tokens: int, loads: Array, i: int, stack: Array) -> int:
    """Return the first of the bins with room for a sample that is lowest with it, or -1.

    ``room`` is a tree of maxima, ``low`` has trees of minima; ``stack`` holds 128 nodes.
    """
    size = len(room) // 2
    least, place = np.inf, -1
    stack[0], depth = 1, 1
    while depth:
        depth -= 1
        node = stack[depth]
        if room[node] < tokens:
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
        # The lower child is looked at first: it is put last.
        left = _height_with(low, 2 * node, loads, i) <= _height_with(low, 2 * node + 1, loads, i)
        stack[depth] = 2 * node + left
        stack[depth + 1] = 2 * node + 1 - left
        depth += 2
    return place
