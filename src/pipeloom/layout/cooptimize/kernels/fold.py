"""Cut a chain into two chunks for each rank, down the ranks and up again, to minimize the load of the busiest rank."""

from __future__ import annotations

from pipeloom.compiled import Array, kernel


@kernel
def fold(work: Array, ends: Array, limit: int, hop: int, low: Array, back: Array, cuts: Array) -> bool:
    """Find two runs of layers for every rank, such that load + head + tail are at most ``limit``; return whether they
    exist.

    Ranks 0 to r - 1 leave one run of layers for the other ranks. Among all remaining runs that begin at the same layer,
    only the shortest is considered, because every solution for a longer run also gives one for it. The search is
    therefore exact.

    Parameters
    ----------
    work, ends : array, shape (num_layers + 1,)
        Running sums of the work of all microbatches, and of the times that heads and tails consist of.
    limit, hop : int
        ``hop`` is the time that every further rank adds to head and tail.
    low, back : array, shape (num_ranks + 1, num_layers + 1)
        Scratch: the end of the shortest remaining run, and the start of the remaining run of one rank less.
    cuts : array, shape (2, num_ranks)
        Receives the first layers of the first runs and the ends of the second runs, if a solution exists.
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
            headroom = limit - ends[a] - r * hop
            if b > n or headroom < 0:
                continue
            end = b
            while end > a and work[b] - work[end - 1] <= headroom:
                end -= 1
            others = num_ranks - 1 - r  # each needs a layer
            for first in range(a + 1, b - others + 1):
                left = headroom - (work[first] - work[a])
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
