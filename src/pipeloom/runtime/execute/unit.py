"""Units and messages of one iteration on one rank, and the tensors that they hold."""

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
"""Shape and dtype, as declared by the model."""
Key = tuple[int, int, int]
"""Chunk, microbatch, sub-microbatch."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRole:
    """Properties of a chunk that all of its units share."""

    module: Module
    column: int
    """Number of the module."""
    before: int
    after: int
    """Neighboring chunks inside the module, -1 if there is none."""
    sources: tuple[tuple[int, TensorShape, bool], ...]
    """Modules whose output the chunk takes: number, shape, and whether a gradient flows back."""
    feeds: bool
    """Whether any other module takes its output."""
    trained: bool
    is_last: bool
    needs_part: bool
    """Whether it calls a user function: inputs, context or loss."""
    layer_numbers: tuple[int, int]
    ports: ChunkStreams = NO_STREAMS
    """Streams of its layers."""
    takes: tuple[tuple[str, TensorShape, bool], ...] = ()
    """Streams that it takes from other chunks: name, shape, and whether a gradient flows back."""


@dataclass(slots=True, eq=False)
class PartState:
    """Data of one part of a microbatch for a module.

    It is created on first use and released after the last chunk of the module on this rank.
    """

    module: Module
    microbatch: int
    sub_microbatch: int
    own: Rows | None = None
    """Instances of this rank under encoder data parallelism. None: all instances."""
    num_users: int = 0
    contents: bool = False
    """Whether the module's first layer runs here, so that contents are loaded."""
    loss: bool = False
    """Whether the loss is computed here."""
    part: Part | None = None
    context: dict[str, Any] | None = None


def part_of(state: PartState, packing: Packing, samples: Sequence[Any]) -> Part:
    """Return this rank's part for a module. Samples of a `Dataset` are not loaded yet."""
    part = make_part(state.module.spec, packing, samples, state.microbatch, state.sub_microbatch)
    if state.own is None:
        return part
    first, count = state.own
    return replace(part, instances=part.instances[first : first + count])


@dataclass(slots=True, eq=False, kw_only=True)
class Outlet:
    """A tensor that a unit passes to other units, its output or a stream, and the gradients that come back."""

    declared: ShapeDtype | None
    """Shape and dtype declared by the model. None for the loss."""
    gradients: list[Tensor | None]
    """Gradients that came back, by index of the consumer."""
    cuts: list[tuple[int, int] | None] | None = None
    """First row and number of rows that each consumer takes, by its index; an entry of None takes all rows. None if
    all consumers take all rows.
    """
    local_consumers: list[tuple[int, UnitState, int]] | None = None
    """Consumers on this rank: the index there, the unit, and the index here."""
    num_sends: int = 0
    output: Tensor | None = None

    def rows_for(self, output: Tensor, place: int) -> Tensor:
        """Return the rows that one consumer takes."""
        cut = self.cuts[place] if self.cuts else None
        return output if cut is None else output.narrow(0, *cut)

    def give(self, output: Tensor) -> None:
        """Pass the tensor to consumers on this rank, and keep it for those on other ranks."""
        for place, consumer, place_out in self.local_consumers or ():
            consumer.arrived[place] = self.rows_for(output, place_out)
        if self.num_sends:
            self.output = output.contiguous()

    def take_to_send(self, place: int) -> Tensor | None:
        """Return the tensor to send to one consumer. The last call releases it."""
        tensor = self.output
        if tensor is not None:
            tensor = self.rows_for(tensor, place)
        self.num_sends -= 1
        if self.num_sends == 0:
            self.output = None
        return tensor

    def take_gradient(self, device: torch.device) -> Tensor:
        """Return its gradient: the sum of the gradients from all consumers."""
        if len(self.gradients) == 1 and not self.cuts:
            only, self.gradients[0] = self.gradients[0], None
            if only is None:
                raise ExecutionError("the gradient of its output has not arrived; verify the plan")
            return only
        total: Tensor | None = None
        if self.cuts or not self.gradients:
            # Rows without a consumer have no effect on the loss.
            if self.declared is None:
                raise ExecutionError("its loss was not computed; verify the plan")
            shape, dtype = self.declared
            total = torch.zeros(shape, dtype=dtype, device=device)
        for place, gradient in enumerate(self.gradients):
            if gradient is None:
                raise ExecutionError("a gradient of its output has not arrived; verify the plan")
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
class UnitState(Outlet):
    """The work of one chunk on one (sub-)microbatch, with its inputs and with outputs that other units need.

    A unit is itself the outlet of its output. A plan has thousands of units, so lists that few need are made only if
    needed.
    """

    key: Key
    role: ChunkRole
    part: PartState | None
    bounds: Bounds
    arrived: list[Tensor | None]
    """Transferred tensors by place."""
    input_gradients: list[Tensor | None]
    """Gradients of transferred tensors by place, until they are sent or taken."""
    groups: list[tuple[list[int], TensorShape, bool]] | None
    """At a module boundary and with streams: the transfers that form each upstream argument, in order, and then those
    that form each stream, with their shape, and whether a gradient flows back. A group is empty if the microbatch has
    no data for it. None inside a module without streams, where the transferred tensor is the only upstream argument.
    """
    share: InstanceShare | None = None
    """This rank's share under encoder data parallelism."""
    above: UnitState | None = None
    below: UnitState | None = None
    """The units of the previous and the next chunk, if they are of the same module and on this rank. ``above`` is set
    only if a gradient flows back to it.
    """
    rows: list[int] | None = None
    """Rows of each transferred tensor that was concatenated with others, by place."""
    local_producers: list[tuple[int, Outlet, int]] | None = None
    """Other outlets on this rank that the unit takes from: the place here, the outlet, and the index there."""
    outlets: dict[str, Outlet] | None = None
    """Streams that other chunks take, by name."""
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
            raise ExecutionError("its forward has not run, or its backward has already run")
        return self.activation

    def take_upstream(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the upstream arguments of the first layer, then streams, as leaves that concatenate their parts."""
        trained, share = self.role.trained, self.share
        if self.groups is None:
            whole = self._take(0)
            if not trained:
                return (whole.detach() if share is None else share.cut(0, whole),)
            # The tensor was detached or received only for this unit, so no other unit uses it.
            self.leaves = leaves = ((whole if share is None else share.cut(0, whole)).requires_grad_(),)
            return leaves
        arguments = []
        for argument, (places, shape, flows) in enumerate(self.groups):
            pieces = [self._take(place) for place in places]
            if not pieces:
                leaf = empty_output(shape, device)
            elif len(pieces) == 1:
                leaf = pieces[0].detach()
            else:
                leaf = torch.cat(pieces)
                self.rows = self.rows or [0] * len(self.arrived)
                for place, piece in zip(places, pieces, strict=True):
                    self.rows[place] = len(piece)
            if share is not None:
                leaf = share.cut(argument, leaf)
            arguments.append(leaf.requires_grad_(flows and bool(pieces)))
        if trained:
            self.leaves = arguments
        return tuple(arguments)

    def _take(self, place: int) -> Tensor:
        piece = self.arrived[place]
        if piece is None:
            raise ExecutionError("its input has not arrived; verify the plan")
        self.arrived[place] = None
        return piece

    def check_output(self, output: Tensor) -> None:
        """Raise `ExecutionError` for an output of another shape than declared, before it reaches another rank."""
        if self.declared is None:
            return
        shape, dtype = self.declared
        if self.share is not None:
            shape = (self.share.num_rows, *shape[1:])
        if output.shape != shape or output.dtype != dtype:
            first, last = self.role.layer_numbers
            module = self.role.module
            where = "output" if last == len(module.layers) - 1 else "hidden"
            raise ExecutionError(
                f"module {module.name!r}, layers {first}..{last}, returned {tuple(output.shape)} {output.dtype}, "
                f"declared is {shape} {dtype}; correct `{where}` of the module, or the sizes in its samples' metadata"
            )

    def pass_streams(self, emitted: dict[str, Tensor]) -> None:
        """Pass streams to the chunks that take them."""
        for name, outlet in (self.outlets or {}).items():
            tensor = emitted.pop(name)
            assert outlet.declared is not None
            shape, dtype = outlet.declared
            if tensor.shape != shape or tensor.dtype != dtype:
                module = self.role.module.spec
                layer = next(end.layer for end in module.emits if end.stream == name)
                raise ExecutionError(
                    f"module {module.name!r}, layer {layer}, emits {name!r} of {tuple(tensor.shape)} {tensor.dtype}, "
                    f"declared is {shape} {dtype}; correct `emits` of the module"
                )
            outlet.give(tensor)

    def take_stream_gradients(self, device: torch.device) -> dict[str, Tensor] | None:
        """Return the gradients of the streams that other chunks took."""
        if self.outlets is None:
            return None
        return {name: outlet.take_gradient(device) for name, outlet in self.outlets.items()}

    def split_input_gradients(self) -> None:
        """Split the gradients of the upstream arguments into those of the transferred tensors."""
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
        """Return the whole gradient of one upstream argument."""
        leaf = self.leaves[argument]
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
        return gradient if self.share is None else self.share.whole_gradient(argument, gradient)

    def take_own_gradient(self, device: torch.device) -> Tensor:
        """Return this rank's part of the gradient of its output."""
        gradient = self.take_gradient(device)
        return gradient if self.share is None else self.share.own(gradient)

    def pass_output(self, output: Tensor) -> None:
        """Pass the output to consumers on this rank, and keep it for those on other ranks."""
        if self.below is not None:
            self.below.arrived[0] = output
            return
        self.give(output)

    def pass_gradients(self) -> None:
        """Split the input gradients, and pass each to its producer if that is on this rank."""
        self.split_input_gradients()
        if self.above is not None:
            self.above.gradients[0], self.input_gradients[0] = self.input_gradients[0], None
        for place, producer, place_out in self.local_producers or ():
            producer.gradients[place_out], self.input_gradients[place] = self.input_gradients[place], None

    def unlink(self) -> None:
        """Clear references to other units."""
        self.above = self.below = self.local_consumers = self.local_producers = self.outlets = None


@dataclass(slots=True, eq=False)
class MessageState:
    """One end of a message of a unit. ``place`` is its index among the unit's inputs or the outlet's consumers."""

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
    """Whether it is posted together with the next posted message."""

    def take(self) -> Tensor:
        """Return the tensor to send."""
        if self.backward:
            tensor = self.unit.input_gradients[self.place]
            self.unit.input_gradients[self.place] = None
        else:
            tensor = self.outlet.take_to_send(self.place)
        if tensor is None:
            raise ExecutionError("the tensor to send has not been computed yet; verify the plan")
        return tensor

    def deliver(self) -> None:
        """Pass the received tensor to the unit."""
        (self.outlet.gradients if self.backward else self.unit.arrived)[self.place] = self.tensor
        self.tensor = None
