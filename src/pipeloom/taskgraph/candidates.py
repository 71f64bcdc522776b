"""Candidates of pairs, also as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FORWARD_NS, BACKWARD_NS, WEIGHT_NS, ACTIVATION_BYTES, WEIGHT_GRADIENT_BYTES, HOST_BYTES = range(6)
"""Columns of `candidate_cube`."""


class Candidate(NamedTuple):
    """One memory strategy of a pair. When chosen, it replaces the pair's durations and bytes.

    For a whole backward, ``backward_ns`` is its duration and ``weight_ns`` is 0. For a split backward, they are the
    durations of I and W. ``host_bytes`` are on the host from the forward to the end of B or I.
    """

    strategy: str
    forward_ns: int
    backward_ns: int
    weight_ns: int
    activation_bytes: int
    weight_gradient_bytes: int
    layers: tuple[str, ...] = ()
    host_bytes: int = 0


Cube = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
_latest: tuple[Sequence[tuple[Candidate, ...]], Cube] | None = None
"""The last candidates and their cube. A search over orders of one graph requests the same cube repeatedly."""


def candidate_cube(candidates: Sequence[tuple[Candidate, ...]]) -> Cube:
    """Return the candidates of all pairs as read-only arrays.

    The first, of shape (num_pairs, most candidates, 6), has nanoseconds and bytes; rows with fewer candidates repeat
    their first. The second has the number of candidates of each pair.
    """
    global _latest
    latest = _latest
    if latest is not None and latest[0] is candidates:
        return latest[1]
    cube = _read(candidates)
    _latest = candidates, cube
    return cube


def _read(candidates: Sequence[tuple[Candidate, ...]]) -> Cube:
    # Pairs of equal chunks share one tuple, so each tuple is read once. Comparing contents would take longer.
    number = np.fromiter(map(id, candidates), np.int64, len(candidates))
    _, first, which = np.unique(number, return_index=True, return_inverse=True)
    distinct = [candidates[i] for i in first.tolist()]
    lengths = np.array([len(row) for row in distinct], np.int64)
    # Fields 0 and 6 are strings.
    rows = np.array([candidate[1:6] + candidate[7:] for row in distinct for candidate in row], np.int64).reshape(-1, 6)
    column = np.arange(lengths.max(initial=0))
    column = np.where(column < lengths[:, None], column, 0) + (np.cumsum(lengths) - lengths)[:, None]
    cube = rows[column][which], lengths[which]
    for array in cube:
        array.setflags(write=False)
    return cube
