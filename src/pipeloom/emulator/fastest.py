"""Find the fastest memory strategy of an emulated iteration that fits."""

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
    """Emulate the fastest of several strategies that fits in memory.

    Parameters
    ----------
    strategies : sequence of ChunkStrategy or their texts
        From the fastest to the one with the least memory.

    Raises
    ------
    InfeasibleError
        If none fits. The message has the lowest peak and the limit.
    """
    best: Step | None = None
    smallest: Step | None = None
    step: Step | None = None
    for strategy in strategies:
        step = Step(model, microbatches, strategy, like=step)
        if step.planned_fits:
            if best is None or step.planned_ps < best.planned_ps:
                best = step
            if step.planned_unconstrained:
                break  # memory is no constraint, so more recomputation only takes time
        elif best is None:
            smallest = step
    if best is None:
        assert smallest is not None
        peak, limit = max(smallest.run().peak_bytes), smallest.capacity
        raise InfeasibleError(
            f"needs {peak / GIB:.1f} GiB on a device at best, {limit / GIB:.1f} GiB are usable; "
            "raise tensor or pipeline parallelism"
        )
    return best.run()
