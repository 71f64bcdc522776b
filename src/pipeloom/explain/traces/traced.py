"""What a trace says: computations and messages of every rank, iteration by iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Unit(NamedTuple):
    """What is computed: kind (`taskgraph.FORWARD` and the others), stage, microbatch."""

    kind: int
    stage: int
    microbatch: int


class Computation(NamedTuple):
    """One forward or backward as it ran. ``entered_ns <= received_ns <= start_ns <= end_ns``.

    Between ``entered_ns`` and ``received_ns`` the rank waited for a message; what else lies between two computations
    is the host's: Python, posting of messages, launches.
    """

    unit: Unit
    start_ns: int
    end_ns: int
    entered_ns: int
    received_ns: int
    arrived_ns: int | None
    """When its input came, where the rank was there before it; None: it was there already, or there is none."""
    held_by: Unit | None = None
    """Whose output the rank waited for to be taken by its receiver, where that wait ended last."""

    @property
    def waited_ns(self) -> int:
        """Time in waits."""
        return self.received_ns - self.entered_ns


class PostedReceive(NamedTuple):
    """A receive."""

    at_ns: int
    shape: tuple[int, ...]
    """Of the tensor; empty: shapes were not recorded."""
    num_bytes: int
    """0: not known."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration: of every pipeline rank its computations in running order, all on one clock."""

    number: int
    ranks: tuple[tuple[Computation, ...], ...]
    posted: tuple[dict[Unit, PostedReceive], ...]
    """Per rank, the receives of units' inputs, where the trace has them."""
    allocated: tuple[dict[Unit, int], ...] = ()
    """Per rank, bytes that a unit takes and does not give back (negative: gives back); empty: not recorded."""

    @property
    def start_ns(self) -> int:
        """First start of a computation."""
        return min(rank[0].start_ns for rank in self.ranks)

    @property
    def measured_ns(self) -> int:
        """From the first start to the last end of a computation."""
        return max(rank[-1].end_ns for rank in self.ranks) - self.start_ns


@dataclass(frozen=True, slots=True)
class TracedRun:
    """A pipeline's traces.

    Attributes
    ----------
    sources : tuple of str
        Files, one a pipeline rank.
    stage_rank : tuple of int
        Pipeline rank of every stage.
    num_microbatches : int
    iterations : tuple of Iteration
    clock_shift_ns : tuple of int
        What was added to every rank's clock.
    between_ns : int
        Median time from the end of an iteration to the start of the next one: optimiser, data; 0: one iteration only.
    on_device : bool
        Computations are kernels of a device, not operators of the host.
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
        """Pipeline ranks."""
        return len(self.sources)

    @property
    def num_stages(self) -> int:
        """Stages, over all ranks."""
        return len(self.stage_rank)
