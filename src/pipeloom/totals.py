"""Sums of times and sizes: none may leave 64 bits, or kernels would answer nonsense."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipeloom.bounds import MAX_S, MAX_TOTAL
from pipeloom.errors import InputError

NS_PER_S = 1_000_000_000
SMALLER_TIMES = "give smaller times: of the layers in the profile, or of the cluster's links"
SMALLER_SIZES = "give smaller sizes"


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
        raise InputError(entity, f"{seconds:g} s is not below {MAX_S:g} s", SMALLER_TIMES)
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
        bound, remedy = (f"{MAX_S:g} s", SMALLER_TIMES) if times else ("2**62 bytes", SMALLER_SIZES)
        unit = "s" if times else "bytes"
        problem = f"sums to {total:g} {unit}, of which entry {number} is {largest:g}; the sum must stay below {bound}"
        raise InputError(entity, problem, remedy)
    return array.astype(np.int64, copy=False)
