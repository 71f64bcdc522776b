"""Copy numbers in compiled code. Slice assignments check shapes, so they compile slowly."""

from __future__ import annotations

from pipeloom.compiled.decorators import Array, callee


@callee
def assign(target: Array, source: Array) -> None:
    """Copy all of the one-dimensional ``source``."""
    for i in range(len(source)):
        target[i] = source[i]


@callee
def assign_run(target: Array, at: int, source: Array, first: int, count: int) -> None:
    """Copy ``count`` numbers from ``source[first:]`` to ``target[at:]``. The two must not overlap."""
    for i in range(count):
        target[at + i] = source[first + i]
