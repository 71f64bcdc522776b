"""Executors of one rank's stages: one that trains, and one for forwards alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.pipelining import PipelineStage

from pipeloom.integrations.pipelining.planning import planned_shapes
from pipeloom.integrations.pipelining.running import StageExecutor, StepLoss, stage_executor
from pipeloom.runtime.launch.transport import TorchTransport
from pipeloom.runtime.train.evaluate import forward_executor
from pipeloom.spec import Layout


class StageExecutors:
    """Executors of one rank's stages.

    They are made with the first step, when the weights are on their device, and anew when the widths of the stages'
    outputs are measured.
    """

    def __init__(self, stages: Sequence[PipelineStage], layout: Layout, loss: StepLoss) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self._layout, self._loss = layout, loss
        self._training: StageExecutor | None = None
        self._forwards: StageExecutor | None = None

    def get(self, trains: bool, widths: Sequence[float] | None) -> StageExecutor:
        """Return the executor of a training step, or the one for forwards alone; ``widths`` are new ones, or None."""
        if widths is not None or self._training is None:
            self._training, self._forwards = self._made(widths or [1.0] * len(self._layout.chunks)), None
        if trains:
            return self._training
        if self._forwards is None:
            made = forward_executor(self._training)
            assert isinstance(made, StageExecutor)
            self._forwards = made
        return self._forwards

    def _made(self, widths: Sequence[float]) -> StageExecutor:
        stages = list(self._stages.values())
        return stage_executor(
            stages,
            self._layout,
            stages[0].group_rank,
            TorchTransport(stages[0].group),
            self._loss,
            planned_shapes(widths),
            self._reduce,
        )

    def _reduce(self, chunk: int, _: Sequence[nn.Module]) -> None:
        """Reduce a stage's gradients over all ranks that have it, as PyTorch does, and scale them."""
        self._stages[chunk].perform_reduce_grad(self._loss.scale)
