"""Run a chain of stages with the runtime's executor; shapes may differ in every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipeloom.errors import ExecutionError
from pipeloom.integrations.steps.shapes import Metas, empty_header, flat_meta, header, metas_of, read_header
from pipeloom.plan import Verb
from pipeloom.runtime.execute.executor import Executor
from pipeloom.runtime.execute.iteration import Iteration
from pipeloom.runtime.execute.linker import LinkedPlan
from pipeloom.runtime.execute.options import ExecutionOptions
from pipeloom.runtime.execute.unit import MessageState, PartState, UnitState
from pipeloom.runtime.launch.coordination import message_device
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


class StepMicrobatch(Protocol):
    """One microbatch of a step on one rank.

    Attributes
    ----------
    metas : list
        Shapes and types by boundary; None if they are unknown yet. The boundary before a stage has the stage's number.
    """

    metas: list[Metas | None]


def note_shapes(microbatch: StepMicrobatch, stage: int, outputs: Sequence[Tensor], remedy: str) -> Metas:
    """Return shapes and types of a stage's outputs, and note them at the boundary behind it.

    Parameters
    ----------
    remedy : str
        What to do if shapes were predicted otherwise, for the error message.

    Raises
    ------
    ExecutionError
        When other shapes were predicted, which the receiver expects.
    """
    metas = metas_of(outputs, stage)
    expected = microbatch.metas[stage + 1]
    if expected is None:
        microbatch.metas[stage + 1] = metas
    elif metas != expected:
        raise ExecutionError(
            f"stage {stage} returned {_described(metas)}, but {_described(expected)} was predicted; {remedy}"
        )
    return metas


def _described(metas: Metas) -> str:
    return ", ".join(f"{tuple(meta.shape)} {str(meta.dtype).removeprefix('torch.')}" for meta in metas)


class StepIteration(Iteration):
    """An iteration in which unknown shapes of messages are sent ahead of them."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # A group of NCCL alone cannot send from the host.
        self.header_device = message_device(getattr(self.here.transport, "group", None), self.device)
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
            numbers = empty_header().to(self.header_device)
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
            numbers = header(metas).to(self.header_device)
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

    def _microbatch(self, message: MessageState) -> StepMicrobatch:
        members = self.linked.packing.microbatches[message.unit.key[1]].samples
        found: StepMicrobatch = self.samples[members[0]]
        return found


class StepExecutor(Executor):
    """Runs plans of a chain of stages on one rank; see `Executor`."""

    iteration_type: type[Iteration] = StepIteration

    def with_shapes(self, linked: LinkedPlan, microbatches: Sequence[StepMicrobatch]) -> LinkedPlan:
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


def step_executor(
    layers: Mapping[int, nn.Module],
    layout: Layout,
    rank: int,
    transport: Transport,
    loss: Callable[[Any, Part], Tensor],
    shapes: Sequence[TensorShape],
    *,
    device: torch.device | str,
    inputs: Callable[[Part], Any] | None = None,
    reduce_gradients: ReduceGradients | None = None,
    executor: type[StepExecutor] = StepExecutor,
) -> StepExecutor:
    """Make the executor of this rank's stages; stages of other ranks are identities here.

    Parameters
    ----------
    layers : mapping
        This rank's stages by number. Each is called with its input and with the microbatch as a keyword.
    loss : callable
        Returns a scalar from the last stage's output and its part, whose one sample is the microbatch.
    shapes : sequence of TensorShape
        Shapes of the stages' outputs by which plans are made. Actual shapes are found in the step.
    inputs : callable or None
        Returns the first stage's inputs from a part. None: it has none.
    executor : type
        Class of the executor.
    """
    module = Module(
        MODULE,
        [layers.get(number) or nn.Identity() for number in range(len(layout.chunks))],
        reads="sequence",
        hidden=list(shapes[:-1]),
        output=shapes[-1],
        inputs=inputs or (lambda _: ()),
        context=lambda part: {"microbatch": part.samples[0]},
        kinds=tuple(map(stage_kind, range(len(layout.chunks)))),
    )
    model = Model([module], loss, lambda _: 1.0)
    options = ExecutionOptions(device=device, random_seed=None, workers=0)
    return executor(model, layout, rank, transport, options=options, reduce_gradients=reduce_gradients)


def stage_kind(number: int) -> str:
    """Return the kind of a stage as a layer; every stage has its own kind, and so its own cost."""
    return f"stage{number}"
