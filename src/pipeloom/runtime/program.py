"""Program: one rank's actions of one plan, linked to the units and messages that they work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import ExecutionError, InputError
from pipeloom.packing import Packing
from pipeloom.plan import (
    Action,
    ExecutionPlan,
    HandOver,
    Routes,
    Unit,
    action_text,
    boundary_shapes,
    make_routes,
)
from pipeloom.runtime.blocks import Passage, block_bounds
from pipeloom.runtime.model import Model, Module, empty_output, torch_dtype
from pipeloom.runtime.transport import Handle
from pipeloom.spec import Layout


@dataclass(slots=True, eq=False)
class UnitState:
    """One chunk's work on one (sub-)microbatch, and the tensors that wait for it or for others.

    Attributes
    ----------
    stated : shape and dtype, or None
        Of the output, as the model states them; None for the loss.
    rows : list of int
        Rows of what is handed over, by place.
    groups : list of (places, producing Module, whether a gradient goes back)
        Hand-overs that make up each upstream argument, in order; none where the microbatch has nothing for it.
    arrived : list
        What was handed over, by place.
    gradients : list
        Gradients of the output that came back, by place among the unit's consumers.
    input_gradients : list
        Gradients of what was handed over, by place, until they are sent or taken.
    """

    unit: Unit
    module: Module
    is_first: bool
    is_last: bool
    trained: bool
    bounds: tuple[tuple[int, int, bool], ...]
    layer_numbers: tuple[int, int]
    stated: tuple[tuple[int, ...], torch.dtype] | None
    rows: list[int] = field(default_factory=list)
    groups: list[tuple[list[int], Module, bool]] = field(default_factory=list)
    arrived: list[Tensor | None] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    input_gradients: list[Tensor | None] = field(default_factory=list)
    local_consumers: list[tuple[int, UnitState]] = field(default_factory=list)
    local_producers: list[tuple[int, UnitState, int]] = field(default_factory=list)
    num_sends: int = 0
    output: Tensor | None = None
    passage: Passage | None = None
    leaves: list[Tensor] = field(default_factory=list)

    @property
    def part_key(self) -> tuple[str, int, int]:
        """Which part of which module this unit works on."""
        return (self.module.name, self.unit.microbatch, self.unit.sub_microbatch)

    @property
    def passage_now(self) -> Passage:
        """The passage between F and the end of the backward."""
        if self.passage is None:
            raise ExecutionError("its forward was not run, or its backward was run before")
        return self.passage

    def take_upstream(self, device: torch.device) -> tuple[Tensor, ...]:
        """Upstream arguments of the first layer: each a leaf, of all its parts concatenated."""
        for places, module, flows in self.groups:
            pieces = []
            for place in places:
                piece = self.arrived[place]
                if piece is None:
                    raise ExecutionError("what it takes has not arrived; verify the plan")
                pieces.append(piece)
                self.arrived[place] = None
            if not pieces:
                leaf = empty_output(module.spec, device)
            else:
                leaf = pieces[0].detach() if len(pieces) == 1 else torch.cat(pieces)
            self.leaves.append(leaf.requires_grad_(flows and bool(pieces)))
        taken = tuple(self.leaves)
        if not self.trained:
            self.leaves = []
        return taken

    def check_output(self, output: Tensor) -> None:
        """Refuse an output that is not what the model states, before it reaches another rank."""
        if self.stated is None:
            return
        shape, dtype = self.stated
        if output.shape != shape or output.dtype != dtype:
            first, last = self.layer_numbers
            where = "output" if last == len(self.module.layers) - 1 else "hidden"
            raise ExecutionError(
                f"module {self.module.name!r}, layers {first}..{last}, gave {tuple(output.shape)} {output.dtype}, "
                f"stated is {shape} {dtype}; correct `{where}` of the module, or the sizes in its samples' metadata"
            )

    def take_gradient(self) -> Tensor:
        """Gradient of the output: the sum of what all consumers sent back."""
        total: Tensor | None = None
        for place, gradient in enumerate(self.gradients):
            if gradient is None:
                raise ExecutionError("the gradient it takes has not arrived; verify the plan")
            total = gradient if total is None else total + gradient
            self.gradients[place] = None
        if total is None:
            raise ExecutionError("nothing takes its output, so it has no gradient")
        return total

    def split_input_gradients(self) -> None:
        """Cut the gradients of the upstream arguments into the pieces that were handed over."""
        for (places, _, flows), leaf in zip(self.groups, self.leaves, strict=True):
            if not flows or not places:
                continue
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
            begin = 0
            for place in places:
                # The whole gradient where there is one piece: no view, which could not be sent as it is.
                count = self.rows[place]
                piece = gradient if len(places) == 1 else gradient.narrow(0, begin, count)
                self.input_gradients[place] = piece
                begin += count
        self.leaves = []


@dataclass(slots=True, eq=False)
class MessageState:
    """One end of one message, seen from a unit: its ``place`` among what the unit takes or gives."""

    unit: UnitState
    place: int
    backward: bool
    peer: int
    tag: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor | None = None
    handle: Handle | None = None

    def take(self) -> Tensor:
        """The tensor to send."""
        if self.backward:
            tensor = self.unit.input_gradients[self.place]
            self.unit.input_gradients[self.place] = None
        else:
            tensor = self.unit.output
            self.unit.num_sends -= 1
            if self.unit.num_sends == 0:
                self.unit.output = None
        if tensor is None:
            raise ExecutionError("what it sends was not computed yet; verify the plan")
        return tensor

    def deliver(self) -> None:
        """Give the received tensor to the unit."""
        (self.unit.gradients if self.backward else self.unit.arrived)[self.place] = self.tensor
        self.tensor = None

    def wait(self) -> None:
        """Block until the message is through."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None


@dataclass(slots=True, eq=False)
class Program:
    """Actions with what they work on: a `UnitState`, a `MessageState`, a chunk number, or None. Runs once."""

    plan: ExecutionPlan
    packing: Packing
    actions: tuple[Action, ...]
    steps: Sequence[tuple[str, Any]]
    units: list[UnitState]
    was_run: bool = False


def compile_program(
    plan: ExecutionPlan, packing: Packing, layout: Layout, model: Model, rank: int
) -> Program:
    """Link one rank's actions.

    Raises
    ------
    ExecutionError
        When plan, packing, layout and model do not belong together.
    """
    if plan.layout != layout.digest or plan.num_ranks != layout.num_ranks:
        raise ExecutionError(
            f"the plan is for layout {plan.layout} on {plan.num_ranks} ranks, this one is {layout.digest} on "
            f"{layout.num_ranks}; plan for the layout that is run"
        )
    return _Linker(plan, packing, layout, model, rank).link()


class _Linker:
    def __init__(
        self, plan: ExecutionPlan, packing: Packing, layout: Layout, model: Model, rank: int
    ) -> None:
        self.plan, self.packing, self.layout, self.model, self.rank = plan, packing, layout, model, rank
        self.number_of = {name: i for i, name in enumerate(layout.chunk_names)}
        self.shapes = boundary_shapes(model.spec, layout)
        self.states: dict[Unit, UnitState] = {}
        self.messages: dict[tuple[bool, bool, Unit, str], MessageState] = {}
        """By whether it is a gradient, whether it is sent, producer, and consumer chunk where named."""

    def link(self) -> Program:
        try:
            routes = make_routes(
                self.layout,
                self.packing,
                [self._unit(a) for actions in self.plan.ranks for a in actions if a.verb == "F"],
            )
        except InputError as error:
            raise ExecutionError(f"the plan does not fit the packing: {error}") from error
        actions = self.plan.ranks[self.rank]
        for action in actions:
            if action.verb == "F":
                unit = self._unit(action)
                self.states[unit] = self._state(unit, action.strategy, routes)
        for number, hand_over in enumerate(routes.hand_overs):
            self._connect(routes, hand_over, number)
        steps = [(action.verb, self._argument(action)) for action in actions]
        return Program(self.plan, self.packing, actions, steps, list(self.states.values()))

    def _unit(self, action: Action) -> Unit:
        if action.chunk not in self.number_of:
            raise ExecutionError(f"'{action_text(action)}': the layout has no chunk {action.chunk!r}")
        return Unit(self.number_of[action.chunk], action.microbatch, action.sub_microbatch)

    def _state(self, unit: Unit, strategy: str, routes: Routes) -> UnitState:
        chunk = self.layout.chunks[unit.chunk]
        module = self.model.module(chunk.module)
        is_last = module is self.model.modules[-1] and chunk.layers[1] == len(module.layers) - 1
        into = routes.into.get(unit, ())
        state = UnitState(
            unit=unit,
            module=module,
            is_first=chunk.layers[0] == 0,
            is_last=is_last,
            trained=self.layout.has_backward(chunk.module),
            bounds=block_bounds(strategy, chunk.num_layers),
            layer_numbers=chunk.layers,
            stated=None if is_last else self._stated(unit),
            arrived=[None] * len(into),
            input_gradients=[None] * len(into),
            gradients=[None] * len(routes.out_of.get(unit, ())),
            rows=[self._stated(hand_over.producer)[0][0] for hand_over in into],
        )
        sources = module.after if state.is_first else (module.name,)
        for source in sources:
            places = [i for i, h in enumerate(into) if self.layout.chunks[h.producer.chunk].module == source]
            state.groups.append((places, self.model.module(source), self.layout.has_backward(source)))
        return state

    def _stated(self, unit: Unit) -> tuple[tuple[int, ...], torch.dtype]:
        module = self.layout.chunks[unit.chunk].module
        part = self.packing.parts_of(unit.microbatch, module)[unit.sub_microbatch]
        shape, dtype = self.shapes(unit.chunk, part.workload)
        return shape, torch_dtype(dtype)

    def _connect(self, routes: Routes, hand_over: HandOver, number: int) -> None:
        """Connect two units: directly on this rank, by messages to and from another."""
        producer, consumer = self.states.get(hand_over.producer), self.states.get(hand_over.consumer)
        if producer is None and consumer is None:
            return
        place_in = routes.into[hand_over.consumer].index(hand_over)
        place_out = routes.out_of[hand_over.producer].index(hand_over)
        if producer is not None and consumer is not None:
            producer.local_consumers.append((place_in, consumer))
            if hand_over.gradient:
                consumer.local_producers.append((place_in, producer, place_out))
            return
        target = ""
        if routes.target_is_needed(hand_over.producer):
            target = self.layout.chunk_name(hand_over.consumer.chunk)
        here = producer or consumer
        assert here is not None
        place = place_out if producer is not None else place_in
        peer = self.layout.chunks[
            (hand_over.consumer if producer is not None else hand_over.producer).chunk
        ].rank
        shape, dtype = self._stated(hand_over.producer)
        for backward in (False, True):
            self.messages[backward, (producer is not None) != backward, hand_over.producer, target] = (
                MessageState(here, place, backward, peer, 2 * number + backward, shape, dtype)
            )
        if producer is not None:
            producer.num_sends += 1

    def _argument(self, action: Action) -> UnitState | MessageState | int | None:
        verb = action.verb
        if verb == "OS":
            return None
        unit = self._unit(action)
        if verb in ("RG", "UN"):
            return unit.chunk
        if len(verb) == 1 or verb in ("RC", "OF", "LD"):
            if unit not in self.states:
                raise ExecutionError(f"'{action_text(action)}' has no F on rank {self.rank}")
            return self.states[unit]
        key = (verb[1] == "B", verb[0] in "SD", unit, action.target)
        if key not in self.messages:
            raise ExecutionError(
                f"'{action_text(action)}' is no message that rank {self.rank} has to do with"
            )
        message = self.messages[key]
        if action.shape is not None and (
            action.shape != message.shape
            or torch_dtype(action.dtype) != message.dtype
            or action.peer != message.peer
        ):
            raise ExecutionError(
                f"'{action_text(action)}': the model states {message.shape} {message.dtype} with rank "
                f"{message.peer}; plan with the model and the batch that are run"
            )
        return message
