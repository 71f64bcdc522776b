"""Limits of candidates: times and sizes can be summed under every choice."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.errors import InputError
from pipeloom.limits import MAX_S, MAX_TOTAL
from pipeloom.taskgraph.candidates import Candidate
from pipeloom.totals import NS_PER_S, SMALLER_SIZES, SMALLER_TIMES


def check_candidates(candidates: Sequence[tuple[Candidate, ...]]) -> None:
    """Raise `InputError` if some choice of candidates sums to `MAX_TOTAL` nanoseconds or bytes, or more."""
    # Pairs of equal chunks share one tuple, which is read once.
    known: dict[int, tuple[int, int]] = {}
    time = size = 0
    for row in candidates:
        if id(row) not in known:
            most_ns = max(c.forward_ns + c.backward_ns + c.weight_ns for c in row)
            known[id(row)] = most_ns, max(max(c.activation_bytes, c.weight_gradient_bytes) for c in row)
        time, size = time + known[id(row)][0], size + known[id(row)][1]
    if time >= MAX_TOTAL:
        problem = f"the longest of all pairs sum to {time / NS_PER_S:g} s, which is not below {MAX_S:g} s"
        raise InputError("pairs.candidates", problem, SMALLER_TIMES)
    if size >= MAX_TOTAL:
        problem = f"the largest of all pairs sum to {size} bytes, which is not below 2**62"
        raise InputError("pairs.candidates", problem, SMALLER_SIZES)
