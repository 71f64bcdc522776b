"""Reusable runs of operators (PipeWeaver §4.2).

By the timing rule of the kernels, a run of operators is a max-plus matrix from the times at which devices and inputs
are ready to the times at which devices are free and outputs are ready.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipeloom.emulator.rules import IntArray
from pipeloom.emulator.tape import NUM_DEVICES
from pipeloom.lazy import lazy_module
from pipeloom.totals import check_total, summable

if TYPE_CHECKING:
    from pipeloom.emulator import kernels
else:
    kernels = lazy_module("pipeloom.emulator.kernels")

NUM_PORTS = 2
"""Inputs of a run, and as many outputs: the activation or gradient, and the entry of the layer before."""
SIZE = NUM_DEVICES + NUM_PORTS
"""Rows and columns of the matrices."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """Operators in issue order on the local devices."""

    device: IntArray
    duration_ps: IntArray
    """Device and time of every operator, shape (num_operators,)."""
    predecessor_start: IntArray
    predecessor: IntArray
    """Compressed rows of the operators that every operator waits for; ``-1 - i`` is input i."""
    outputs: IntArray
    """Operator (or ``-1 - i``) of each output."""
    powers: dict[int, IntArray] = field(default_factory=dict, repr=False)
    """Cached matrices of repeated runs, by their number."""

    @functools.cached_property
    def total_ps(self) -> int:
        """Sum of all durations, an upper bound of the matrix entries."""
        return int(summable("operators of a subgraph", self.duration_ps, "ps").sum())

    @functools.cached_property
    def matrix(self) -> IntArray:
        """Max-plus matrix, shape (`SIZE`, `SIZE`)."""
        out = np.empty((SIZE, SIZE), np.int64)
        ends = np.empty((len(self.device), SIZE), np.int64)
        kernels.transfer(
            self.device, self.predecessor_start, self.predecessor, self.duration_ps, self.outputs, out, ends
        )
        return out

    def repeated(self, times: int) -> IntArray:
        """Return the matrix of ``times`` runs in a row, by repeated squaring, cached."""
        check_total("a repeated subgraph", self.total_ps * times, "ps")
        if times not in self.powers:
            self.powers[times] = _power(self.matrix, times)
        return self.powers[times]


def _power(power: IntArray, times: int) -> IntArray:
    out: IntArray | None = None
    while times:
        if times & 1:
            out = power if out is None else kernels.compose(power, out)
        times >>= 1
        if times:
            power = kernels.compose(power, power)
    assert out is not None
    return out
