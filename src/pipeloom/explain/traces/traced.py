"""Data of traces: computations and messages of every rank, by iteration."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.taskgraph import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT


class Unit(NamedTuple):
    """A computation by kind (such as `taskgraph.FORWARD`), stage and microbatch."""

    kind: int
    stage: int
    microbatch: int


class Computation(NamedTuple):
    """Times of one forward or backward, with ``entered_ns <= received_ns <= start_ns <= end_ns``.

    Between ``entered_ns`` and ``received_ns``, the rank waited for a message. Other time between two computations is
    host time: Python, posting of messages, kernel launches.
    """

    unit: Unit
    start_ns: int
    end_ns: int
    entered_ns: int
    received_ns: int
    arrived_ns: int | None
    """Arrival of its input, if the rank waited for it; None if it arrived earlier or there is no input."""
    held_by: Unit | None = None
    """Unit whose sent output the rank waited for to be received, if that wait ended last."""


class PostedReceive(NamedTuple):
    """A posted receive."""

    at_ns: int
    shape: tuple[int, ...]
    """Shape of the tensor; empty if shapes were not recorded."""
    num_bytes: int
    """Size of the tensor; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """Computations of one iteration by pipeline rank, in running order, on one clock."""

    number: int
    ranks: tuple[tuple[Computation, ...], ...]
    posted: tuple[dict[Unit, PostedReceive], ...]
    """Receives of units' inputs by rank, if the trace has them."""
    allocated: tuple[dict[Unit, int], ...] = ()
    """Net bytes that each unit allocates, by rank (negative: frees); empty if not recorded."""

    @property
    def start_ns(self) -> int:
        """Start of the first computation."""
        return min(rank[0].start_ns for rank in self.ranks)

    @property
    def measured_ns(self) -> int:
        """Time from the first start to the last end of a computation."""
        return max(rank[-1].end_ns for rank in self.ranks) - self.start_ns


@dataclass(frozen=True, slots=True)
class TracedRun:
    """Traces of a pipeline.

    Attributes
    ----------
    sources : tuple of str
        Files, one per pipeline rank.
    stage_rank : tuple of int
        Pipeline rank of every stage.
    clock_shift_ns : tuple of int
        Offset that was added to every rank's clock.
    between_ns : int
        Median time between iterations, for optimizer and data; 0 with one iteration only.
    on_device : bool
        Whether computations are kernels of a device instead of operators of the host.
    """

    sources: tuple[str, ...]
    stage_rank: tuple[int, ...]
    num_microbatches: int
    iterations: tuple[Iteration, ...]
    clock_shift_ns: tuple[int, ...]
    between_ns: int
    on_device: bool

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.sources)

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return len(self.stage_rank)


def input_of(unit: Unit, units: Container[Unit], num_stages: int) -> Unit | None:
    """Return the computation of the neighboring stage whose output ``unit`` takes; None if there is none."""
    if unit.kind == WEIGHT_GRADIENT:
        return None
    if unit.kind == FORWARD:
        before = Unit(FORWARD, unit.stage - 1, unit.microbatch)
        return before if unit.stage > 0 else None
    if unit.stage == num_stages - 1:
        return None
    for kind in (BACKWARD, INPUT_GRADIENT):
        after = Unit(kind, unit.stage + 1, unit.microbatch)
        if after in units:
            return after
    return None
