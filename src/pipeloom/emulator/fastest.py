"""The fastest memory strategy of an emulated iteration that fits."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.emulator.pipeline import PipelineModel, Work
from pipeloom.emulator.result import EmulatedStep
from pipeloom.emulator.step import Step
from pipeloom.errors import InfeasibleError
from pipeloom.spec import ChunkStrategy

GIB = 2**30


def fastest_step(
    model: PipelineModel,
    microbatches: Sequence[Work],
    strategies: Sequence[ChunkStrategy | str] = ("keep", "selective", "recompute:0.5", "recompute"),
) -> EmulatedStep:
    """The fastest of some strategies that fits in memory, given from the fastest to the leanest.

    Raises
    ------
    InfeasibleError
        When none fits; the message has the leanest peak and the limit.
    """
    best: Step | None = None
    leanest: Step | None = None
    step: Step | None = None
    for strategy in strategies:
        step = Step(model, microbatches, strategy, like=step)
        if step.planned_fits:
            if best is None or step.planned_ps < best.planned_ps:
                best = step
            if step.roomy:
                break  # memory is no constraint: recomputing more could only cost time
        elif best is None:
            leanest = step
    if best is None:
        assert leanest is not None
        peak, limit = max(leanest.run().peak_bytes), leanest.capacity
        raise InfeasibleError(
            f"needs {peak / GIB:.1f} GiB on a device at best, {limit / GIB:.1f} GiB are usable; "
            "raise tensor or pipeline parallelism"
        )
    return best.run()
