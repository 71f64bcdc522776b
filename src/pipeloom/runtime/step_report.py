"""What one iteration of training came to."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.cost import Correction
from pipeloom.plan import Answer, Measured
from pipeloom.spec import Batch


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one iteration did; loss and norm over all replicas, everything else of this one.

    Attributes
    ----------
    answer, batch, measured
        Only on the first rank of a pipeline.
    measured : Measured or None
        When every action of every rank ran.
    correction : Correction
        With which the plan was made.
    """

    iteration: int
    loss: float
    gradient_norm: float
    num_microbatches: int
    measured_s: float
    measured_bubble_share: float
    fresh: bool
    lead_s: float
    reason: str
    answer: Answer | None
    batch: Batch | None
    correction: Correction
    measured: Measured | None

    @property
    def measured_ns(self) -> tuple[tuple[int, int], ...]:
        """Measured start and end of every compute action, in the order of ``answer.planned_start_ns``."""
        if self.measured is None or self.answer is None:
            return ()
        return self.measured.compute_ns(self.answer.plan)
