"""Run PyTorch's stages, as layers of one module, with the runtime's executor; shapes may differ in every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from pipeloom.errors import ExecutionError
from pipeloom.integrations.pipelining.shapes import (
    Metas,
    bundle,
    empty_header,
    flat_meta,
    header,
    metas_of,
    read_header,
    unbundle,
)
from pipeloom.plan import Verb
from pipeloom.runtime.execute.executor import Executor
from pipeloom.runtime.execute.iteration import Iteration
from pipeloom.runtime.execute.linker import LinkedPlan
from pipeloom.runtime.execute.options import ExecutionOptions
from pipeloom.runtime.execute.unit import MessageState, PartState, UnitState
from pipeloom.runtime.launch.transport import Handle, Transport
from pipeloom.runtime.model.model import Model, Module, Part
from pipeloom.runtime.model.reduce import ReduceGradients
from pipeloom.spec import Layout, TensorShape

MODULE = "stages"
"""Name of the module whose layers are the stages."""
UNKNOWN = (-1,)
"""Stands for the shape of a message that is sent ahead of it."""
_UNKNOWN_META = UNKNOWN, torch.float32
_WHOLE = ((0, 0),)
"""Instances of a part that is one sample."""
_MOST_LEAVING = 8
"""Most sent messages of a rank whose wait is postponed."""
_SHAPE_TAGS = 1 << 28
"""Added to a message's tag for the shapes that are sent ahead of it."""


@dataclass(slots=True, eq=False)
class StageMicrobatch:
    """One microbatch of a step on one rank.

    Attributes
    ----------
    metas : list
        Shapes and types by boundary; None if they are unknown yet. The boundary before a stage has the stage's number.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
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
    if isinstance(value, Tensor):
        return value.detach()
    return torch.utils._pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, value)


class _StageLayer(nn.Module):
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
            raise ExecutionError(
                f"stage {self.number} takes a DTensor over the mesh of {', '.join(names)}, which is not known; "
                "give PipelineStage its get_mesh"
            ) from error
        return mesh

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
        metas = metas_of(outputs, self.number)
        expected = microbatch.metas[self.number + 1]
        if expected is None:
            microbatch.metas[self.number + 1] = metas
        elif metas != expected:
            raise ExecutionError(
                f"stage {self.number} returned {_described(metas)}, but {_described(expected)} was predicted from the "
                "inputs; let the shapes of a stage's outputs follow from the sizes of the inputs"
            )
        return bundle(outputs, metas)


def _described(metas: Metas) -> str:
    return ", ".join(f"{tuple(meta.shape)} {str(meta.dtype).removeprefix('torch.')}" for meta in metas)


class _StageIteration(Iteration):
    """An iteration in which unknown shapes of messages are sent ahead of them."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ahead: list[tuple[Handle, Tensor]] = []
        self.leaving: deque[tuple[Handle, Tensor | None]] = deque()
        """Messages sent on the CPU whose wait is postponed."""
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            computed = {verb: self._named(verb) for verb in (Verb.F, Verb.B, Verb.I, Verb.W)}
            self.verbs |= computed

    def _named(self, verb: Verb) -> Callable[[Any], None]:
        """Return what a verb calls, in a profiler range named as in PyTorch's schedules, for `pipeloom explain`."""
        call = self.verbs[verb]

        def called(unit: UnitState) -> None:
            chunk, microbatch, _ = unit.key
            number = self.linked.packing.microbatches[microbatch].samples[0]
            with torch.profiler.record_function(f"PP:{chunk}{verb}{number}"):
                call(unit)

        return called

    @property
    def loss_sum(self) -> float:
        """Unused, since losses belong to microbatches."""
        return 0.0

    def _part(self, state: PartState) -> tuple[Part, dict[str, Any]]:
        # Every microbatch is one sample, so that there is nothing to split.
        members = self.linked.packing.microbatches[state.microbatch].samples
        microbatch = self.samples[members[0]]
        return Part((microbatch,), _WHOLE, 0), {"microbatch": microbatch}

    def receive(self, message: MessageState) -> None:
        if message.shape is UNKNOWN and message.backward:
            # The gradient of an output has the shape of the output, which is known by now.
            metas = self._microbatch(message).metas[message.unit.chunk + 1]
            assert metas is not None
            message.shape, message.dtype = flat_meta(metas)
        if message.shape is not UNKNOWN:
            super().receive(message)

    def arrive(self, message: MessageState) -> None:
        if message.shape is UNKNOWN:
            numbers = empty_header()
            self.here.transport.receive(numbers, message.peer, message.tag + _SHAPE_TAGS).wait()
            metas = read_header(numbers)
            self._microbatch(message).metas[message.unit.chunk] = metas
            message.shape, message.dtype = flat_meta(metas)
            super().receive(message)
        super().arrive(message)

    def send(self, message: MessageState) -> None:
        if message.shape is UNKNOWN and not message.backward:
            metas = self._microbatch(message).metas[message.unit.chunk + 1]
            assert metas is not None
            numbers = header(metas)
            handle = self.here.transport.send(numbers, message.peer, message.tag + _SHAPE_TAGS)
            self.ahead.append((handle, numbers))
        super().send(message)

    def sent(self, message: MessageState) -> None:
        if self.device.type != "cpu" or message.handle is None:
            super().sent(message)
            return
        # A wait on the CPU suspends this rank until the receiver has the message. Waking up costs more than the memory
        # that the plan saves by it. A later wait cannot cause a deadlock: the receiver takes the message whatever this
        # rank does after the wait.
        self.leaving.append((message.handle, message.tensor))
        message.handle = message.tensor = None
        if len(self.leaving) > _MOST_LEAVING:
            self.leaving.popleft()[0].wait()

    def finish(self) -> None:
        for handle, _ in (*self.ahead, *self.leaving):
            handle.wait()
        self.ahead = []
        self.leaving.clear()
        super().finish()

    def _microbatch(self, message: MessageState) -> StageMicrobatch:
        members = self.linked.packing.microbatches[message.unit.key[1]].samples
        found: StageMicrobatch = self.samples[members[0]]
        return found


class StageExecutor(Executor):
    """Runs plans of a chain of PyTorch's stages on one rank; see `Executor`."""

    iteration_type = _StageIteration

    def with_shapes(self, linked: LinkedPlan, microbatches: Sequence[StageMicrobatch]) -> LinkedPlan:
        """Give the messages of a linked plan the shapes of the step, or none where they will be sent ahead."""
        members = [microbatch.samples[0] for microbatch in linked.packing.microbatches]
        for unit in linked.units:
            unit.stated = None
        for action, message in zip(linked.actions, linked.arguments, strict=True):
            if action.verb.is_post:
                chunk, microbatch, _ = message.unit.key
                # Inputs of a unit cross the boundary before it, outputs the one behind.
                boundary = chunk + (action.verb in (Verb.SEND_F, Verb.RECV_B))
                metas = microbatches[members[microbatch]].metas[boundary]
                message.shape, message.dtype = _UNKNOWN_META if metas is None else flat_meta(metas)
        return linked


def stage_executor(
    stages: Sequence[PipelineStage],
    layout: Layout,
    rank: int,
    transport: Transport,
    loss: Callable[[Any, Part], Tensor],
    shapes: Sequence[TensorShape],
    reduce_gradients: ReduceGradients,
) -> StageExecutor:
    """Make the executor of this rank's stages; stages of other ranks are identities here.

    ``shapes`` are the shapes of the stages' outputs by which plans are made. Actual shapes are found in the step.
    """
    layers: list[nn.Module] = [nn.Identity() for _ in layout.chunks]
    for stage in stages:
        layers[stage.stage_index] = _StageLayer(stage)
    module = Module(
        MODULE,
        layers,
        reads="sequence",
        hidden=list(shapes[:-1]),
        output=shapes[-1],
        inputs=lambda part: part.samples[0].args,
        context=lambda part: {"microbatch": part.samples[0]},
        kinds=tuple(map(stage_kind, range(len(layers)))),
    )
    model = Model([module], loss, lambda _: 1.0)
    options = ExecutionOptions(device=stages[0].device, random_seed=None, workers=0)
    return StageExecutor(model, layout, rank, transport, options=options, reduce_gradients=reduce_gradients)


def stage_kind(number: int) -> str:
    """Return the kind of a stage as a layer; every stage has its own kind, and so its own cost."""
    return f"stage{number}"
