"""Checks that sums of times and sizes fit into the 64-bit integers of kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError
from pipeloom.limits import MAX_PS, MAX_S, MAX_TOTAL

NS_PER_S = 1_000_000_000
PS_PER_S = 1_000_000_000_000
_PER_S = {"ns": NS_PER_S, "ps": PS_PER_S}
SMALLER_TIMES = "give smaller times: of layers in the profile, of links and devices, or by smaller models and samples"
SMALLER_SIZES = "give smaller sizes"


def to_ns(seconds: float, entity: str = "a time") -> int:
    """Round seconds to integer nanoseconds. Costs become integers only here.

    Raise `InputError` with the ``entity`` if the time is not a number, or `MAX_S` or more.
    """
    if not -MAX_S < seconds < MAX_S:
        raise InputError(entity, f"{seconds:g} s is not below {MAX_S:g} s", SMALLER_TIMES)
    return round(seconds * NS_PER_S)


def summable(entity: str, values: npt.ArrayLike, unit: str = "") -> npt.NDArray[np.int64]:
    """Convert numbers to an integer array whose sum is below `MAX_TOTAL` (`MAX_PS` for picoseconds).

    Parameters
    ----------
    entity : str
        Name of the numbers in the error.
    values : array_like
        Non-negative numbers, as floats if integers could have overflowed before.
    unit : str
        ``ns``, ``ps``, ``bytes`` or another; default: ``ns`` if the entity ends in ``_s``, else ``bytes``.

    Raises
    ------
    InputError
        The sum is too large or not a number. The message has the largest entry.
    """
    unit = unit or ("ns" if entity.endswith("_s") else "bytes")
    try:
        array = np.asarray(values)
        array = array if array.dtype.kind in "if" else np.asarray(values, np.int64)
    except (OverflowError, TypeError):
        array = np.asarray(values, dtype=np.float64)
    total = float(array.sum(dtype=np.float64))
    if not total < _most(unit):
        flat = array.reshape(-1)
        number = int(flat.argmax())
        check_total(entity, total, unit, f", of which entry {number} is {_text(float(flat[number]), unit)}")
    return array.astype(np.int64, copy=False)


def check_total(entity: str, total: float, unit: str, largest: str = "") -> None:
    """Raise `InputError` unless a sum is a number below `MAX_TOTAL` (`MAX_PS`); ``largest`` is added to the message."""
    if not total < _most(unit):
        remedy = SMALLER_TIMES if unit in _PER_S else SMALLER_SIZES
        problem = f"sums to {_text(total, unit)}{largest}; the sum must stay below {_limit_text(unit)}"
        raise InputError(entity, problem, remedy)


def _most(unit: str) -> int:
    return MAX_PS if unit == "ps" else MAX_TOTAL


def _text(number: float, unit: str) -> str:
    return f"{number / _PER_S[unit]:g} s" if unit in _PER_S else f"{number:g} {unit}"


def _limit_text(unit: str) -> str:
    return f"{_most(unit) / _PER_S[unit]:.2g} s" if unit in _PER_S else f"2**62 {unit}"


def check_work(entity: str, count: int, what: str, most: int, remedy: str = "give fewer microbatches") -> None:
    """Raise `InputError` if a command would build more than ``most`` of something."""
    if count > most:
        raise InputError(entity, f"{count} {what} are more than {most}", remedy)
