"""Cut a chain of layers into consecutive parts whose largest load is as small as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from pipeloom.errors import InputError


def partition_chain(loads: Sequence[float], num_parts: int) -> tuple[tuple[int, int], ...]:
    """Cut a chain into ``num_parts`` non-empty runs with the least possible largest load.

    Dynamic programming over the position of the last cut; among optimal answers the one with the
    smallest sum of squared loads, so that slack is spread.

    Returns
    -------
    tuple of (first, last)
        Inclusive positions of each run, in order.

    Raises
    ------
    InputError
        When there are fewer layers than parts.
    """
    n = len(loads)
    if not 1 <= num_parts <= n:
        raise InputError(
            "num_parts", f"{num_parts} is not in 1..{n}", "use fewer chunks than there are layers"
        )
    total = [0.0, *accumulate(loads)]
    # best[i]: (largest load, sum of squares, cut) for the first i layers in the parts so far.
    best: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (n + 1)
    best[0] = (0.0, 0.0, ())
    for part in range(1, num_parts + 1):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (n + 1)
        for end in range(part, n - (num_parts - part) + 1):
            options = []
            for cut in range(part - 1, end):
                before = best[cut]
                if before is not None:
                    load = total[end] - total[cut]
                    options.append((max(before[0], load), before[1] + load * load, (*before[2], cut)))
            following[end] = min(options)
        best = following
    answer = best[n]
    assert answer is not None
    cuts = (*answer[2], n)
    return tuple((first, end - 1) for first, end in pairwise(cuts))
