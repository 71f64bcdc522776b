"""Candidates of pairs, and all of them as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FORWARD_NS, BACKWARD_NS, WEIGHT_NS, ACTIVATION_BYTES, WEIGHT_GRADIENT_BYTES, HOST_BYTES = range(6)
"""Columns of `candidate_cube`."""


class Candidate(NamedTuple):
    """One memory strategy of a pair, replacing its durations and bytes when chosen.

    For a whole backward ``backward_ns`` is its duration and ``weight_ns`` is 0; for a split one they are
    the durations of I and W. ``host_bytes`` lie on the host from the forward to the end of B or I.
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
"""Whose candidates were read last: who tries many orders of a graph asks for the same again and again."""


def candidate_cube(candidates: Sequence[tuple[Candidate, ...]]) -> Cube:
    """Candidates of all pairs as arrays, not to be written to.

    Returns
    -------
    array, shape (num_pairs, most candidates, 6)
        Nanoseconds and bytes; rows with fewer candidates repeat their first.
    array, shape (num_pairs,)
        How many candidates each pair has.
    """
    global _latest
    latest = _latest
    if latest is not None and latest[0] is candidates:
        return latest[1]
    cube = _read(candidates)
    _latest = candidates, cube
    return cube


def _read(candidates: Sequence[tuple[Candidate, ...]]) -> Cube:
    """Equal chunks share one tuple, which is read once."""
    # Told apart by what they are, not by what they hold: comparing thousands of equal ones would take longer.
    number = np.fromiter(map(id, candidates), np.int64, len(candidates))
    _, first, which = np.unique(number, return_index=True, return_inverse=True)
    distinct = [candidates[i] for i in first.tolist()]
    lengths = np.array([len(row) for row in distinct], np.int64)
    # All fields but the words.
    rows = np.array([candidate[1:6] + candidate[7:] for row in distinct for candidate in row], np.int64).reshape(-1, 6)
    column = np.arange(lengths.max(initial=0))
    column = np.where(column < lengths[:, None], column, 0) + (np.cumsum(lengths) - lengths)[:, None]
    cube = rows[column][which], lengths[which]
    for array in cube:
        array.setflags(write=False)
    return cube
