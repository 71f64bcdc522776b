"""Bounds of times and sizes: no sum over a task graph may leave 64 bits, or kernels would answer nonsense."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError
from pipeloom.taskgraph.candidates import Candidate

NS_PER_S = 1_000_000_000
MAX_TOTAL = 2**62
"""Times in nanoseconds and sizes in bytes stay below it, summed too, so that 64-bit sums never overflow."""
MAX_S = 4.6e9
"""Seconds, 146 years: just below `MAX_TOTAL` nanoseconds."""

_SMALLER_TIMES = "give smaller times: of the layers in the profile, or of the cluster's links"
_SMALLER_SIZES = "give smaller sizes"


def to_ns(seconds: float, entity: str = "a time") -> int:
    """Round seconds to integer nanoseconds: the one place where costs become integers.

    Parameters
    ----------
    seconds : float
    entity : str
        Whose time it is, for the error.

    Raises
    ------
    InputError
        It is not a number, or `MAX_S` or more.
    """
    if not -MAX_S < seconds < MAX_S:
        raise InputError(entity, f"{seconds:g} s is not below {MAX_S:g} s", _SMALLER_TIMES)
    return round(seconds * NS_PER_S)


def summable(entity: str, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Whole numbers as an array; their sum is below `MAX_TOTAL`.

    Raises
    ------
    InputError
        It is not; names the largest entry.
    """
    try:
        array = np.asarray(values, dtype=np.int64)
    except OverflowError:
        array = np.asarray(values, dtype=np.float64)
    if array.size and array.sum(dtype=np.float64) >= MAX_TOTAL:
        flat = array.reshape(-1)
        number = int(flat.argmax())
        times = entity.endswith("_s")
        total, largest = (float(value) / (NS_PER_S if times else 1) for value in (flat.sum(dtype=float), flat[number]))
        bound, remedy = (f"{MAX_S:g} s", _SMALLER_TIMES) if times else ("2**62 bytes", _SMALLER_SIZES)
        unit = "s" if times else "bytes"
        problem = f"sums to {total:g} {unit}, of which entry {number} is {largest:g}; the sum must stay below {bound}"
        raise InputError(entity, problem, remedy)
    return array.astype(np.int64, copy=False)


def check_candidates(candidates: Sequence[tuple[Candidate, ...]]) -> None:
    """Refuse candidates of all pairs of which some choice sums to `MAX_TOTAL` nanoseconds or bytes, or more."""
    # Equal chunks share one tuple, which is read once.
    known: dict[int, tuple[int, int]] = {}
    time = size = 0
    for row in candidates:
        if id(row) not in known:
            most_ns = max(c.forward_ns + c.backward_ns + c.weight_ns for c in row)
            known[id(row)] = most_ns, max(max(c.activation_bytes, c.weight_gradient_bytes) for c in row)
        time, size = time + known[id(row)][0], size + known[id(row)][1]
    if time >= MAX_TOTAL:
        problem = f"the longest of all pairs sum to {time / NS_PER_S:g} s, which is not below {MAX_S:g} s"
        raise InputError("pairs.candidates", problem, _SMALLER_TIMES)
    if size >= MAX_TOTAL:
        problem = f"the largest of all pairs sum to {size} bytes, which is not below 2**62"
        raise InputError("pairs.candidates", problem, _SMALLER_SIZES)
