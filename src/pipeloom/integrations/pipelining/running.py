"""PyTorch's stages as the layers of a chain, run by the runtime's executor with shapes that come with the step."""

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
from pipeloom.runtime.execute.iteration import ExecutorOptions, Iteration
from pipeloom.runtime.execute.linker import LinkedPlan
from pipeloom.runtime.execute.unit import MessageState, PartState, UnitState
from pipeloom.runtime.launch.transport import Handle, Transport
from pipeloom.runtime.model.model import Model, Module, Part
from pipeloom.spec import Layout, TensorShape

MODULE = "stages"
"""Name of the one module, whose layers are the stages."""
UNKNOWN = (-1,)
"""In the place of a message's shape: it comes with the message."""
_UNKNOWN_META = UNKNOWN, torch.float32
_WHOLE = ((0, 0),)
"""Instances of a part that is one sample."""
_MOST_LEAVING = 8
"""Messages of a rank that are held though the plan waits for them to have left."""
_SHAPE_TAGS = 1 << 28
"""Added to a message's tag for the shapes that are sent ahead of it."""


@dataclass(slots=True, eq=False)
class StageMicrobatch:
    """One microbatch of a step on one rank.

    Attributes
    ----------
    metas : list
        By boundary (that before a stage has the stage's number), what goes over it; None: not known yet.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    metas: list[Metas | None]
    output: Any = None
    loss: Tensor | None = None


@dataclass(slots=True)
class StepLoss:
    """The loss of a step; what the last stage gives is noted on its way.

    Attributes
    ----------
    function : callable or None
        From output and target to a scalar.
    arguments : mapping
        More of them, by keyword.
    keeps_outputs : bool
    """

    function: Callable[..., Tensor] | None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    keeps_outputs: bool = True
    has_target: bool = True
    scale: int = 1
    """By which gradients are divided in the end."""

    def __call__(self, output: Any, part: Part) -> Tensor:
        """Loss of one microbatch."""
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
    """A stage as a layer: of one tensor what the stage takes, and of what it gives one tensor."""

    def __init__(self, stage: PipelineStage) -> None:
        super().__init__()
        self.submod, self.number = stage.submod, stage.stage_index
        self.is_first, self.is_last = stage.is_first, stage.is_last
        self._meshes: Any = getattr(stage, "_mesh_cache", None)

    def _mesh(self, names: tuple[str, ...]) -> DeviceMesh:
        """By the callback that the stage was given, as PyTorch finds it."""
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
        # The call itself, not `forward` under torch's: hooks are on the stage's module, whose call is torch's.
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
                f"stage {self.number} gave {_described(metas)}, and for such inputs {_described(expected)} was to "
                "come; let what a stage hands on have shapes that follow from the sizes of the inputs"
            )
        return bundle(outputs, metas)


def _described(metas: Metas) -> str:
    return ", ".join(f"{tuple(meta.shape)} {str(meta.dtype).removeprefix('torch.')}" for meta in metas)


class _StageIteration(Iteration):
    """An iteration in which shapes of some messages are not known before they come: those are sent ahead."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ahead: list[tuple[Handle, Tensor]] = []
        self.leaving: deque[tuple[Handle, Tensor | None]] = deque()
        """Sent, and not waited for yet though the plan does: on the CPU."""
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            computed = {verb: self._named(verb) for verb in (Verb.F, Verb.B, Verb.I, Verb.W)}
            self.verbs |= computed

    def _named(self, verb: Verb) -> Callable[[Any], None]:
        """What a verb calls, in a range named as PyTorch names its own, by which `pipeloom explain` finds it."""
        call = self.verbs[verb]

        def called(unit: UnitState) -> None:
            chunk, microbatch, _ = unit.key
            number = self.linked.packing.microbatches[microbatch].samples[0]
            with torch.profiler.record_function(f"PP:{chunk}{verb}{number}"):
                call(unit)

        return called

    @property
    def loss_sum(self) -> float:
        """Nobody asks: losses are the microbatches'."""
        return 0.0

    def _part(self, state: PartState) -> tuple[Part, dict[str, Any]]:
        # Every microbatch is one sample, which is looked up and no more: there is nothing to cut.
        members = self.linked.packing.microbatches[state.microbatch].samples
        microbatch = self.samples[members[0]]
        return Part((microbatch,), _WHOLE, 0), {"microbatch": microbatch}

    def receive(self, message: MessageState) -> None:
        if message.shape is UNKNOWN and message.backward:
            # Of what this rank gave: by now it has run.
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
        # A wait on the CPU puts this rank to sleep until the other end has taken the message, and waking costs more
        # than what a plan gains by it: memory. Later than the plan is as free of deadlock: the other end takes the
        # message whatever this rank does after the plan's wait.
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
                # What a unit takes goes over the boundary before it, what it gives over the one behind.
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
    options: ExecutorOptions,
    shapes: Sequence[TensorShape],
) -> StageExecutor:
    """Make the executor of this rank's stages; other ranks' stages are nothing here.

    ``shapes`` are those by which plans are made, of what each stage hands on; what really comes is found in the step.
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
    return StageExecutor(model, layout, rank, transport, stages[0].device, options=options)


def stage_kind(number: int) -> str:
    """Kind of a stage as a layer: each costs what it costs."""
    return f"stage{number}"
