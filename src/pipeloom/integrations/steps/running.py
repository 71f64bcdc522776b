"""Run a chain of stages with the runtime's executor; shapes may differ in every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.errors import ExecutionError
from pipeloom.integrations.steps.shapes import Metas, bundle, empty_header, flat_meta, header, metas_of, read_header
from pipeloom.plan import Verb
from pipeloom.runtime.execute.executor import Executor
from pipeloom.runtime.execute.iteration import Iteration
from pipeloom.runtime.execute.linker import LinkedPlan
from pipeloom.runtime.execute.options import ExecutionOptions
from pipeloom.runtime.execute.unit import MessageState, PartState, UnitState
from pipeloom.runtime.launch import accelerator
from pipeloom.runtime.launch.coordination import message_device
from pipeloom.runtime.launch.transport import Handle, TorchTransport
from pipeloom.runtime.model.model import Model, Module, Part
from pipeloom.runtime.model.reduce import ReduceGradients
from pipeloom.spec import Chunk, Layout, ModuleLayout, TensorShape

MODULE = "stages"
"""Name of the module whose layers are the stages."""
ENCODER = "images"
"""Name of the module whose layers are the stages of an encoder of images, before the others."""
UNKNOWN = (-1,)
"""Stands for the shape of a message that is sent ahead of it."""
_UNKNOWN_META = UNKNOWN, torch.float32
_WHOLE = ((0, 0),)
"""Instances of a part that is one sample."""
_MOST_LEAVING = 8
"""Most sent messages of a rank whose wait is postponed."""
_SHAPE_TAGS = 1 << 28
"""Added to a message's tag for the shapes that are sent ahead of it."""


def num_encoder_stages(layout: Layout) -> int:
    """Return the number of stages of the encoder, which are the first ones."""
    return sum(chunk.module == ENCODER for chunk in layout.chunks)


def stage_layout(rank_of: Sequence[int], num_ranks: int, **settings: Any) -> Layout:
    """Return the layout of a chain of stages from the rank of each, with further fields of the layout."""
    chunks = tuple(Chunk(MODULE, (i, i), rank) for i, rank in enumerate(rank_of))
    return Layout(num_ranks, (ModuleLayout(MODULE),), chunks, **settings)


def encoder_layout(
    rank_of: Sequence[int], num_ranks: int, num_encoder: int, *, most_images: int | None, frozen: bool
) -> Layout:
    """Return the layout of a chain of stages of which the first ``num_encoder`` are an encoder of images.

    ``most_images`` is the maximum of images in a sub-microbatch of the encoder; None: all of a microbatch. No gradient
    flows into a frozen encoder.
    """
    modules = ModuleLayout(ENCODER, frozen=frozen, sub_microbatch=most_images), ModuleLayout(MODULE, (ENCODER,))
    places = [(ENCODER, i) if i < num_encoder else (MODULE, i - num_encoder) for i in range(len(rank_of))]
    chunks = tuple(Chunk(name, (i, i), rank) for (name, i), rank in zip(places, rank_of, strict=True))
    return Layout(num_ranks, modules, chunks)


def bundled(outputs: Sequence[Tensor], known: list[Metas | None], stage: int, remedy: str) -> Tensor:
    """Concatenate a stage's outputs, and note their shapes and types at the boundary behind it.

    Parameters
    ----------
    known : list
        Shapes and types by boundary; None if they are unknown yet. The boundary before a stage has the stage's number.
    remedy : str
        What to do if shapes were predicted otherwise, for the error message.
    """
    metas = metas_of(outputs, stage)
    expected = known[stage + 1]
    if expected is None:
        known[stage + 1] = metas
    elif metas != expected:
        raise ExecutionError(
            f"stage {stage} returned {_described(metas)}, but {_described(expected)} was predicted; {remedy}"
        )
    return bundle(outputs, metas)


def _described(metas: Metas) -> str:
    return ", ".join(f"{tuple(meta.shape)} {str(meta.dtype).removeprefix('torch.')}" for meta in metas)


class StepTransport(TorchTransport):
    """The transport of the stages' messages. All ranks of the group make it together, before the first step.

    Attributes
    ----------
    shapes : TorchTransport
        Messages of the host, for shapes that are sent ahead. They do not wait for the device.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        super().__init__(group)
        self.shapes: TorchTransport = self
        if message_device(group, device).type != "cpu":
            # A group of NCCL alone.
            ranks = dist.get_process_group_ranks(group)
            beside = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            self.shapes = TorchTransport(beside)
        if accelerator.on_accelerator(device):
            self.connect(device)


class StepIteration(Iteration):
    """An iteration in which unknown shapes of messages are sent ahead of them."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        assert isinstance(self.here.transport, StepTransport)
        self.shapes = self.here.transport.shapes
        self.num_encoder = num_encoder_stages(self.here.layout)
        self.ahead: list[tuple[Handle, Tensor]] = []
        self.leaving: deque[tuple[Handle, Tensor | None]] = deque()
        """Messages sent on the CPU whose wait is postponed."""
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            self.verbs |= {verb: self._named(verb) for verb in (Verb.F, Verb.B, Verb.I, Verb.W)}

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
        number = self.linked.packing.microbatches[state.microbatch].samples[0]
        microbatch = self.samples[number]
        if state.module.name == ENCODER:
            microbatch = microbatch.parts[state.sub_microbatch]
        return Part((microbatch,), _WHOLE, 0), {"microbatch": microbatch}

    def receive(self, message: MessageState) -> None:
        if message.shape is UNKNOWN and message.backward:
            # The gradient of an output has the shape of the output, which is known by now.
            message.shape, message.dtype = flat_meta(self._sent_metas(message))
        elif message.shape is UNKNOWN and self.queues.device.type != "cpu":
            # NCCL matches messages in the order of their posts, so that this one cannot be postponed. The sender does
            # not wait for anything that is posted here later: plans for a single communicator are verified for that.
            self._receive_shape(message)
        if message.shape is not UNKNOWN:
            super().receive(message)

    def arrive(self, message: MessageState) -> None:
        if message.shape is UNKNOWN:
            self._receive_shape(message)
            super().receive(message)
        super().arrive(message)

    def _receive_shape(self, message: MessageState) -> None:
        """Receive the shape of a stage's input, which its sender sends ahead. The host waits for it."""
        text = empty_header()
        self.shapes.receive(text, message.peer, message.tag + _SHAPE_TAGS).wait()
        metas = read_header(text)
        boundary, metas_of = self._boundary(message, outward=False)
        metas_of[boundary] = metas
        message.shape, message.dtype = flat_meta(metas)

    def send(self, message: MessageState) -> None:
        if message.shape is UNKNOWN and not message.backward:
            text = header(self._sent_metas(message))
            self.ahead.append((self.shapes.send(text, message.peer, message.tag + _SHAPE_TAGS), text))
        super().send(message)

    def sent(self, message: MessageState) -> None:
        if self.queues.device.type != "cpu" or message.handle is None:
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

    def zero_missing(self) -> None:
        """Leave gradients that are missing, as the library's schedules do."""

    def _boundary(self, message: MessageState, *, outward: bool) -> tuple[int, list[Metas | None]]:
        return _crossed(message, outward, self.linked, self.samples, self.num_encoder)

    def _sent_metas(self, message: MessageState) -> Metas:
        """Return what crosses the boundary behind a stage, which is known once the stage has run."""
        boundary, metas_of = self._boundary(message, outward=True)
        metas = metas_of[boundary]
        assert metas is not None
        return metas


def _crossed(
    message: MessageState, outward: bool, linked: LinkedPlan, microbatches: Sequence[Any], num_encoder: int
) -> tuple[int, list[Metas | None]]:
    """Return the boundary that a message crosses, and the shapes by boundary of what crosses it.

    ``outward`` is whether the stage before the boundary has the message: its output, or the gradient of that.
    """
    chunk, microbatch, sub = message.unit.key
    boundary = chunk + outward
    found = microbatches[linked.packing.microbatches[microbatch].samples[0]]
    if 0 < boundary <= num_encoder:
        # The first stage after the encoder takes the outputs of all sub-microbatches, in their order.
        found = found.parts[message.place if chunk == num_encoder else sub]
    return boundary, found.metas


class StepExecutor(Executor):
    """Runs plans of a chain of stages on one rank; see `Executor`."""

    iteration_type: type[Iteration] = StepIteration

    def with_shapes(self, linked: LinkedPlan, microbatches: Sequence[Any]) -> LinkedPlan:
        """Give the messages of a linked plan the shapes of the step, or none where they will be sent ahead."""
        num_encoder = num_encoder_stages(self.layout)
        for unit in linked.units:
            unit.declared = None
        for action, message in zip(linked.actions, linked.arguments, strict=True):
            if action.verb.is_post:
                # Inputs of a unit cross the boundary before it, outputs the one behind.
                outward = action.verb in (Verb.SEND_F, Verb.RECV_B)
                boundary, metas_of = _crossed(message, outward, linked, microbatches, num_encoder)
                metas = metas_of[boundary]
                message.shape, message.dtype = _UNKNOWN_META if metas is None else flat_meta(metas)
        return linked


def step_executor(
    layers: Mapping[int, nn.Module],
    layout: Layout,
    rank: int,
    transport: StepTransport,
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
    modules = []
    for entry in layout.modules:
        numbers = layout.chunks_of(entry.name)
        modules.append(
            Module(
                entry.name,
                [layers.get(number) or nn.Identity() for number in numbers],
                reads="images" if entry.name == ENCODER else "sequence",
                hidden=[shapes[number] for number in numbers[:-1]],
                output=shapes[numbers[-1]],
                inputs=inputs or (lambda _: ()),
                context=lambda part: {"microbatch": part.samples[0]},
                after=entry.after,
                frozen=entry.frozen,
                kinds=tuple(map(stage_kind, numbers)),
            )
        )
    model = Model(modules, loss, lambda _: 1.0)
    options = ExecutionOptions(device=device, random_seed=None, workers=0)
    return executor(model, layout, rank, transport, options=options, reduce_gradients=reduce_gradients)


def stage_kind(number: int) -> str:
    """Return the kind of a stage as a layer; every stage has its own kind, and so its own cost."""
    return f"stage{number}"
