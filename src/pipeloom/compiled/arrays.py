"""Copies of numbers inside compiled code: an assignment to all of an array tests shapes, and so compiles slowly."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.compiled.decorators import callee

Array = npt.NDArray[Any]


@callee
def assign(target: Array, source: Array) -> None:
    """Copy all of ``source``, of one axis."""
    for i in range(len(source)):
        target[i] = source[i]


@callee
def assign_run(target: Array, at: int, source: Array, first: int, count: int) -> None:
    """Copy ``count`` numbers from ``first`` on to ``at``; the two are no parts of one array."""
    for i in range(count):
        target[at + i] = source[first + i]
