"""Sums of times and sizes: none may leave 64 bits, or kernels would answer nonsense."""

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
    """Round seconds to integer nanoseconds: the one place where costs become integers.

    Parameters
    ----------
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


def summable(entity: str, values: npt.ArrayLike, unit: str = "") -> npt.NDArray[np.int64]:
    """Whole numbers as an array; their sum is below `MAX_TOTAL`, or `MAX_PS` in picoseconds.

    Parameters
    ----------
    entity : str
        Whose numbers they are, for the error.
    values : array_like
        Not negative; floats where integers might have overflowed before.
    unit : str
        ``ns``, ``ps``, ``bytes`` or another; default: nanoseconds where the entity ends in ``_s``, bytes elsewhere.

    Raises
    ------
    InputError
        The sum is larger, or not a number; names the largest entry.
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
    """Raise `InputError` unless a sum is below `MAX_TOTAL`, or `MAX_PS`; ``largest`` says more of it.

    A sum that is not a number is refused too.
    """
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
    """Raise `InputError` where a command would build more than ``most`` of something, before it begins."""
    if count > most:
        raise InputError(entity, f"{count} {what} are more than {most}", remedy)
