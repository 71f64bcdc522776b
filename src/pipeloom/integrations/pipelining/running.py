"""PyTorch's stages as layers of one module, and their loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_map_only

from pipeloom.errors import ExecutionError
from pipeloom.integrations.steps.running import bundled
from pipeloom.integrations.steps.shapes import Metas, Signature, unbundle
from pipeloom.runtime.model.model import Part
from pipeloom.runtime.model.sharding import sharded_modules

_REMEDY = "let the shapes of a stage's outputs follow from the sizes of the inputs"


@dataclass(slots=True, eq=False)
class StageMicrobatch:
    """One microbatch of a step on one rank.

    Attributes
    ----------
    inputs : Signature
        Signature of the inputs on the rank of the first stage.
    metas : list
        Shapes and types by boundary; None if they are unknown yet. The boundary before a stage has the stage's number.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    inputs: Signature
    metas: list[Metas | None]
    output: Any = None
    loss: Tensor | None = None


@dataclass(slots=True)
class StepLoss:
    """The loss of a step. Notes outputs and losses of the last stage.

    Attributes
    ----------
    function : callable or None
        Returns a scalar from output and target.
    arguments : mapping
        Keyword arguments of the function.
    """

    function: Callable[..., Tensor] | None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    keeps_outputs: bool = True
    has_target: bool = True
    scale: int = 1
    """Divisor of the gradients at the end of the step."""

    def __call__(self, output: Any, part: Part) -> Tensor:
        """Return the loss of one microbatch."""
        microbatch: StageMicrobatch = part.samples[0]
        if self.keeps_outputs:
            microbatch.output = _detached(output)
        if self.function is None or not self.has_target:
            return torch.zeros(())
        loss = self.function(output, microbatch.target, **self.arguments)
        microbatch.loss = loss.detach()
        return loss.reshape(()) if loss.dim() else loss


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else tree_map_only(Tensor, lambda x: x.detach(), value)


class StageLayer(nn.Module):
    """A stage as a layer, which takes and returns one tensor."""

    def __init__(self, stage: PipelineStage) -> None:
        super().__init__()
        self.submod, self.number = stage.submod, stage.stage_index
        self.is_first, self.is_last = stage.is_first, stage.is_last
        self._meshes: Any = getattr(stage, "_mesh_cache", None)

    def _mesh(self, names: tuple[str, ...]) -> DeviceMesh:
        """Return the mesh from the stage's ``get_mesh``, as PyTorch does."""
        try:
            mesh: DeviceMesh = self._meshes.get_mesh((names, None))
        except Exception as error:
            problem = f"stage {self.number} takes a DTensor over the mesh of {', '.join(names)}, which is not known"
            raise ExecutionError(f"{problem}; give PipelineStage its get_mesh") from error
        return mesh

    def to(self, *given: Any, **named: Any) -> Self:
        """Move the stage as `torch.nn.Module.to` does, unless FSDP places its parameters, possibly on the host."""
        return self if any(sharded_modules([self])) else super().to(*given, **named)

    def __call__(self, *given: Any, microbatch: StageMicrobatch) -> Any:
        """Run the stage on one microbatch."""
        # Overrides the call, not `forward`, since hooks belong to the stage's module.
        if not self.is_first:
            metas = microbatch.metas[self.number]
            assert metas is not None
            given = unbundle(given[0], metas, self._mesh)
        output = self.submod(*given, **microbatch.kwargs)
        if self.is_last:
            return output
        outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        return bundled(outputs, microbatch.metas, self.number, _REMEDY)
