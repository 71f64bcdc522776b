"""Executors of one rank's stages: one that trains, and one for forwards alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeloom.integrations.steps.planning import planned_shapes
from pipeloom.integrations.steps.running import StepExecutor
from pipeloom.runtime.train.evaluate import forward_executor
from pipeloom.spec import Layout, TensorShape


class StepExecutors:
    """Executors of one rank's stages, which ``make`` returns from the shapes of their outputs by which plans are made.

    They are made with the first step, when the weights are on their device, and anew when the widths of the stages'
    outputs are measured.
    """

    def __init__(self, layout: Layout, make: Callable[[Sequence[TensorShape]], StepExecutor]) -> None:
        self._layout, self._make = layout, make
        self._training: StepExecutor | None = None
        self._forwards: StepExecutor | None = None

    def get(self, trains: bool, widths: Sequence[float] | None) -> StepExecutor:
        """Return the executor of a training step, or the one for forwards alone; ``widths`` are new ones, or None."""
        if widths is not None or self._training is None:
            shapes = planned_shapes(widths or [1.0] * len(self._layout.chunks))
            self._training, self._forwards = self._make(shapes), None
        if trains:
            return self._training
        if self._forwards is None:
            made = forward_executor(self._training)
            assert isinstance(made, StepExecutor)
            self._forwards = made
        return self._forwards
