"""Call one of several compiled functions by its number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeloom.compiled.decorators import inlined


def one_of(functions: Sequence[Any], first: int = 0) -> Any:
    """Return a compiled function ``(number, *arguments)`` that calls one of several compiled functions.

    It searches the number by halves, because kernels have no tables of functions.

    Parameters
    ----------
    functions : sequence
        Compiled functions with the same types of arguments and results.
    first : int
        Number of the first function.
    """
    if len(functions) == 1:
        only = functions[0]

        @inlined
        def call(_number: int, *arguments: Any) -> Any:
            return only(*arguments)

        return call
    half = len(functions) // 2
    middle = first + half
    low, high = one_of(functions[:half], first), one_of(functions[half:], middle)

    @inlined
    def choose(number: int, *arguments: Any) -> Any:
        if number < middle:
            return low(number, *arguments)
        return high(number, *arguments)

    return choose
