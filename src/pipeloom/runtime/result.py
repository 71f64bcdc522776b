"""What one iteration gave on one rank: losses, times, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.plan import COMPUTE_VERBS, WAIT_VERBS, Action


class ActionTime(NamedTuple):
    """When one action ran, on the host's monotonic clock."""

    verb: str
    chunk: str
    microbatch: int
    sub_microbatch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one iteration gave on one rank.

    Attributes
    ----------
    loss_sum : float
        Sum of the losses of the microbatches whose last chunk is here, before division by ``normaliser``;
        0.0 on ranks without the last chunk.
    normaliser : float
        Targets of the global batch: what the gradients are divided by.
    actions : tuple of Action
        Those that were run, in order.
    moments_ns : sequence of int
        On the host's monotonic clock: when the first action began, and when each was done and the next one began.
    num_recomputed : int
        Layers run a second time.
    offloaded_bytes : int
        Moved to the host.
    sent_bytes, received_bytes : int
    """

    loss_sum: float
    normaliser: float
    actions: tuple[Action, ...]
    moments_ns: Sequence[int]
    num_recomputed: int
    offloaded_bytes: int
    sent_bytes: int
    received_bytes: int

    @property
    def times(self) -> tuple[ActionTime, ...]:
        """When every action ran, in order; waits too. Put together when it is asked for."""
        return tuple(
            ActionTime(a.verb, a.chunk, a.microbatch, a.sub_microbatch, begin, end)
            for a, begin, end in zip(self.actions, self.moments_ns, self.moments_ns[1:], strict=False)
        )

    @property
    def compute_times(self) -> tuple[ActionTime, ...]:
        """The F, B, I and W alone, in the rank's order: what a schedule has tasks for."""
        return tuple(t for t in self.times if t.verb in COMPUTE_VERBS)

    @property
    def waiting_ns(self) -> int:
        """Time spent in waits for messages."""
        return sum(t.end_ns - t.start_ns for t in self.times if t.verb in WAIT_VERBS)
