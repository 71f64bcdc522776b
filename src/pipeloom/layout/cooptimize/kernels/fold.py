"""Cut a chain for two chunks on each rank, down the ranks and up again, with the least on the fullest rank."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.compiled import kernel

Array = npt.NDArray[Any]


@kernel
def fold(work: Array, ends: Array, limit: int, hop: int, low: Array, back: Array, cuts: Array) -> bool:
    """Give every rank a first and a second run of layers with load, head and tail up to ``limit``, if there are such.

    What ranks 0 to r - 1 leave is one run of layers. Of all that begin at the same layer, the shortest is left, since
    whatever suits a longer one suits it too: so this is exact.

    Parameters
    ----------
    work, ends : array, shape (num_layers + 1,)
        Running sums of all microbatches' work, and of what a rank's head and tail are made of.
    limit, hop : int
        ``hop``: what every rank further adds to head and tail.
    low, back : array, shape (num_ranks + 1, num_layers + 1)
        Scratch: end of the shortest rest, and where the rest of one rank less begins.
    cuts : array, shape (2, num_ranks)
        Gets the first layers of the first runs, and the ends of the second ones. Written only if there is an answer.
    """
    n = len(work) - 1
    num_ranks = cuts.shape[1]
    for r in range(num_ranks):
        for a in range(n + 1):
            low[r, a] = n + 1
    low[0, 0] = n
    for r in range(num_ranks - 1):
        for a in range(n):
            b = low[r, a]
            room = limit - ends[a] - r * hop
            if b > n or room < 0:
                continue
            end = b
            while end > a and work[b] - work[end - 1] <= room:
                end -= 1
            others = num_ranks - 1 - r  # each needs a layer
            for first in range(a + 1, b - others + 1):
                left = room - (work[first] - work[a])
                if left < 0:
                    break
                while work[b] - work[end] > left:
                    end += 1
                rest = max(end, first + others)
                if rest < low[r + 1, first]:
                    low[r + 1, first] = rest
                    back[r + 1, first] = a
    last = num_ranks - 1
    for a in range(n):
        b = low[last, a]
        if a < b <= n and work[b] - work[a] + ends[a] + last * hop <= limit:
            for r in range(last, -1, -1):
                cuts[0, r] = a
                cuts[1, r] = low[r, a]
                a = back[r, a]
            return True
    return False
