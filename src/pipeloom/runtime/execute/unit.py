"""Units and messages of one iteration on one rank, and the tensors that wait in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import ExecutionError
from pipeloom.packing import Packing
from pipeloom.runtime.execute.blocks import NO_STREAMS, Bounds, ChunkActivation, ChunkStreams
from pipeloom.runtime.launch.transport import Handle
from pipeloom.runtime.model.encoder_dp import InstanceShare, Rows
from pipeloom.runtime.model.model import Module, Part, empty_output, make_part
from pipeloom.spec import TensorShape

ShapeDtype = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype, as the model states them."""
Key = tuple[int, int, int]
"""Chunk, microbatch, sub-microbatch."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRole:
    """What is fixed about a chunk's units.

    Attributes
    ----------
    column : int
        Number of the module.
    before, after : int
        Neighbours inside the module; -1: none.
    sources : tuple of (int, shape, bool)
        Modules whose output it takes: number, shape of that, whether a gradient goes back.
    feeds : bool
        Whether any other module takes its output.
    needs_part : bool
        Whether any user function is asked: inputs, context or loss.
    ports : ChunkStreams
        Streams of its layers.
    takes : tuple of (str, shape, bool)
        Streams that it takes from other chunks: name, shape, whether a gradient goes back.
    """

    module: Module
    column: int
    before: int
    after: int
    sources: tuple[tuple[int, TensorShape, bool], ...]
    feeds: bool
    trained: bool
    is_last: bool
    needs_part: bool
    layer_numbers: tuple[int, int]
    ports: ChunkStreams = NO_STREAMS
    takes: tuple[tuple[str, TensorShape, bool], ...] = ()


@dataclass(slots=True, eq=False)
class PartState:
    """What one part of a microbatch gives a module: made when first asked for, let go after the last chunk here."""

    module: Module
    microbatch: int
    sub_microbatch: int
    own: Rows | None = None
    """Instances that this rank has of it, where they are dealt; None: all."""
    num_users: int = 0
    contents: bool = False
    """Whether the module's first layer runs here, so that contents are loaded."""
    loss: bool = False
    """Whether the loss is taken of it here."""
    part: Part | None = None
    context: dict[str, Any] | None = None


def part_of(state: PartState, packing: Packing, samples: Sequence[Any]) -> Part:
    """What this rank gives the module of one part; samples of a `Dataset` are not loaded yet."""
    part = make_part(state.module.spec, packing, samples, state.microbatch, state.sub_microbatch)
    if state.own is None:
        return part
    first, count = state.own
    return replace(part, instances=part.instances[first : first + count])


class Outlet:
    """A tensor that a unit gives to others, its output or a stream, and the gradients that come back.

    Attributes
    ----------
    stated : shape and dtype, or None
        As the model states them; None for the loss.
    gradients : list
        Those that came back, by place among the consumers.
    cuts : list of (int, int) or None
        Rows that each consumer takes, by place among them: the first, and how many; None: all. Empty where all take
        all.
    local_consumers : list of (int, UnitState, int)
        Units on this rank that it is given to: the place there, the unit, and the place here.
    """

    stated: ShapeDtype | None
    gradients: list[Tensor | None]
    cuts: list[tuple[int, int] | None] | None
    local_consumers: list[tuple[int, UnitState, int]] | None
    num_sends: int
    output: Tensor | None

    def given(self, output: Tensor, place: int) -> Tensor:
        """What one consumer takes of it."""
        cut = self.cuts[place] if self.cuts else None
        return output if cut is None else output.narrow(0, *cut)

    def give(self, output: Tensor) -> None:
        """Give it to the units on this rank that take it, and keep it for those that do not lie here."""
        for place, consumer, place_out in self.local_consumers or ():
            consumer.arrived[place] = self.given(output, place_out)
        if self.num_sends:
            self.output = output.contiguous()

    def take_to_send(self, place: int) -> Tensor | None:
        """What is sent to one consumer; let go with the last."""
        tensor = self.output
        if tensor is not None:
            tensor = self.given(tensor, place)
        self.num_sends -= 1
        if self.num_sends == 0:
            self.output = None
        return tensor

    def take_gradient(self, device: torch.device) -> Tensor:
        """Its gradient: the sum of what all consumers sent back."""
        if len(self.gradients) == 1 and not self.cuts:
            only, self.gradients[0] = self.gradients[0], None
            if only is None:
                raise ExecutionError("the gradient it takes has not arrived; verify the plan")
            return only
        total: Tensor | None = None
        if self.cuts or not self.gradients:
            # Rows that nobody took, or all of them, have no effect on the loss.
            if self.stated is None:
                raise ExecutionError("its loss was not computed; verify the plan")
            shape, dtype = self.stated
            total = torch.zeros(shape, dtype=dtype, device=device)
        for place, gradient in enumerate(self.gradients):
            if gradient is None:
                raise ExecutionError("the gradient it takes has not arrived; verify the plan")
            self.gradients[place] = None
            cut = self.cuts[place] if self.cuts else None
            if total is None:
                total = gradient
            elif cut is not None:
                total.narrow(0, *cut).add_(gradient)
            else:
                total = total + gradient
        assert total is not None
        return total


@dataclass(slots=True, eq=False)
class StreamOutlet(Outlet):
    """A stream of a unit that other chunks take."""

    stated: ShapeDtype | None
    gradients: list[Tensor | None]
    cuts: list[tuple[int, int] | None] | None = None
    local_consumers: list[tuple[int, UnitState, int]] | None = None
    num_sends: int = 0
    output: Tensor | None = None


@dataclass(slots=True, eq=False)
class UnitState(Outlet):
    """One chunk's work on one (sub-)microbatch, and the tensors that wait for it or for others.

    It is itself the outlet of its output.

    Attributes
    ----------
    groups : list of (places, shape, whether a gradient goes back), or None
        At a module boundary, and where streams are taken: transfers that make up each upstream argument, in order, then
        each stream; none where the microbatch has nothing for it. None inside a module without streams, where the one
        upstream argument is what was transferred.
    rows : list of int
        Rows of what is transferred, by place, where there are groups.
    arrived : list
        What was transferred, by place.
    input_gradients : list
        Gradients of what was transferred, by place, until they are sent or taken.
    share : InstanceShare or None
        What this rank has of it, where its module's instances are dealt to tensor-parallel ranks.
    above, below : UnitState or None
        The unit of the chunk before, and of the one after, where that is of the same module and on this rank; ``above``
        only where a gradient goes back to it.
    local_producers : list of (int, Outlet, int)
        Outlets on this rank that it takes from, but for ``above``: the place here, the outlet, and the place there. A
        plan has thousands of units: a list is made only where there is something to put into it.
    outlets : dict of StreamOutlet, or None
        By name, streams that other chunks take.
    """

    key: Key
    role: ChunkRole
    part: PartState | None
    bounds: Bounds
    stated: ShapeDtype | None
    arrived: list[Tensor | None]
    input_gradients: list[Tensor | None]
    groups: list[tuple[list[int], TensorShape, bool]] | None
    gradients: list[Tensor | None]
    share: InstanceShare | None = None
    above: UnitState | None = None
    below: UnitState | None = None
    rows: list[int] | None = None
    cuts: list[tuple[int, int] | None] | None = None
    local_consumers: list[tuple[int, UnitState, int]] | None = None
    num_sends: int = 0
    output: Tensor | None = None
    local_producers: list[tuple[int, Outlet, int]] | None = None
    outlets: dict[str, StreamOutlet] | None = None
    activation: ChunkActivation | None = None
    leaves: Sequence[Tensor] = ()

    @property
    def chunk(self) -> int:
        """Number of its chunk."""
        return self.key[0]

    @property
    def activation_now(self) -> ChunkActivation:
        """The activation between F and the end of the backward."""
        if self.activation is None:
            raise ExecutionError("its forward was not run, or its backward was run before")
        return self.activation

    def take_upstream(self, device: torch.device) -> tuple[Tensor, ...]:
        """Upstream arguments of the first layer, then streams: each a leaf, of all its parts concatenated."""
        trained, share = self.role.trained, self.share
        if self.groups is None:
            whole = self._take(0)
            if not trained:
                return (whole.detach() if share is None else share.cut(0, whole),)
            # Nobody else has it: it was detached, or received, for this unit alone.
            self.leaves = leaves = ((whole if share is None else share.cut(0, whole)).requires_grad_(),)
            return leaves
        taken = []
        for argument, (places, shape, flows) in enumerate(self.groups):
            pieces = [self._take(place) for place in places]
            if not pieces:
                leaf = empty_output(shape, device)
            else:
                leaf = pieces[0].detach() if len(pieces) == 1 else torch.cat(pieces)
            if share is not None:
                leaf = share.cut(argument, leaf)
            taken.append(leaf.requires_grad_(flows and bool(pieces)))
        if trained:
            self.leaves = taken
        return tuple(taken)

    def _take(self, place: int) -> Tensor:
        piece = self.arrived[place]
        if piece is None:
            raise ExecutionError("what it takes has not arrived; verify the plan")
        self.arrived[place] = None
        return piece

    def check_output(self, output: Tensor) -> None:
        """Refuse an output that is not what the model states, before it reaches another rank."""
        if self.stated is None:
            return
        shape, dtype = self.stated
        if self.share is not None:
            shape = (self.share.num_rows, *shape[1:])
        if output.shape != shape or output.dtype != dtype:
            first, last = self.role.layer_numbers
            module = self.role.module
            where = "output" if last == len(module.layers) - 1 else "hidden"
            raise ExecutionError(
                f"module {module.name!r}, layers {first}..{last}, gave {tuple(output.shape)} {output.dtype}, "
                f"stated is {shape} {dtype}; correct `{where}` of the module, or the sizes in its samples' metadata"
            )

    def hand_streams(self, given: dict[str, Tensor]) -> None:
        """Give streams to the chunks that take them."""
        for name, outlet in (self.outlets or {}).items():
            tensor = given.pop(name)
            assert outlet.stated is not None
            shape, dtype = outlet.stated
            if tensor.shape != shape or tensor.dtype != dtype:
                module = self.role.module.spec
                layer = next(end.layer for end in module.emits if end.stream == name)
                raise ExecutionError(
                    f"module {module.name!r}, layer {layer}, emits {name!r} of {tuple(tensor.shape)} {tensor.dtype}, "
                    f"stated is {shape} {dtype}; correct `emits` of the module"
                )
            outlet.give(tensor)

    def take_stream_gradients(self, device: torch.device) -> dict[str, Tensor] | None:
        """Gradients of the streams that other chunks took."""
        if self.outlets is None:
            return None
        return {name: outlet.take_gradient(device) for name, outlet in self.outlets.items()}

    def split_input_gradients(self) -> None:
        """Cut the gradients of the upstream arguments into the pieces that were transferred."""
        if self.groups is None:
            if self.leaves:
                self.input_gradients[0] = self._gradient_of(0)
                self.leaves = ()
            return
        for argument, (places, _, flows) in enumerate(self.groups if self.leaves else ()):
            if not flows or not places:
                continue
            gradient = self._gradient_of(argument)
            if len(places) == 1:
                self.input_gradients[places[0]] = gradient
                continue
            assert self.rows is not None
            begin = 0
            for place in places:
                self.input_gradients[place] = gradient.narrow(0, begin, self.rows[place])
                begin += self.rows[place]
        self.leaves = ()

    def _gradient_of(self, argument: int) -> Tensor:
        """Of one upstream argument, whole."""
        leaf = self.leaves[argument]
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
        return gradient if self.share is None else self.share.whole_gradient(argument, gradient)

    def take_own_gradient(self, device: torch.device) -> Tensor:
        """The gradient of its output, as far as it is computed here."""
        gradient = self.take_gradient(device)
        return gradient if self.share is None else self.share.own(gradient)

    def hand_on(self, output: Tensor) -> None:
        """Give the output to the units on this rank that take it, and keep it for those that do not lie here."""
        if self.below is not None:
            self.below.arrived[0] = output
            return
        self.give(output)

    def hand_back(self) -> None:
        """Cut the gradients of what was transferred and give each piece to its producer, if that is on this rank."""
        self.split_input_gradients()
        if self.above is not None:
            self.above.gradients[0], self.input_gradients[0] = self.input_gradients[0], None
        for place, producer, place_out in self.local_producers or ():
            producer.gradients[place_out], self.input_gradients[place] = self.input_gradients[place], None

    def unlink(self) -> None:
        """Let go of the other units."""
        self.above = self.below = self.local_consumers = self.local_producers = self.outlets = None


@dataclass(slots=True, eq=False)
class MessageState:
    """One end of one message, seen from a unit: its ``place`` among what the unit takes, or an outlet gives."""

    unit: UnitState
    outlet: Outlet
    place: int
    backward: bool
    peer: int
    tag: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor | None = None
    handle: Handle | None = None
    joins_next: bool = False
    """Whether it is posted together with the message that is posted next."""

    def take(self) -> Tensor:
        """The tensor to send."""
        if self.backward:
            tensor = self.unit.input_gradients[self.place]
            self.unit.input_gradients[self.place] = None
        else:
            tensor = self.outlet.take_to_send(self.place)
        if tensor is None:
            raise ExecutionError("what it sends was not computed yet; verify the plan")
        return tensor

    def deliver(self) -> None:
        """Give the received tensor to the unit."""
        (self.outlet.gradients if self.backward else self.unit.arrived)[self.place] = self.tensor
        self.tensor = None
