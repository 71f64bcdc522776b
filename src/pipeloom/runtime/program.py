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
    Router,
    Unit,
    action_text,
    boundary_shapes,
    handed_workload,
    target_word,
)
from pipeloom.runtime.blocks import Bounds, Passage, block_bounds
from pipeloom.runtime.model import Model, Module, empty_output, torch_dtype
from pipeloom.runtime.transport import Handle
from pipeloom.spec import Layout


@dataclass(slots=True, eq=False)
class UnitState:
    """One chunk's work on one (sub-)microbatch, and the tensors that wait for it or for others.

    Attributes
    ----------
    part_key : tuple
        Module, microbatch and sub-microbatch.
    needs_part : bool
        Whether any user function is asked: inputs, context or loss.
    stated : shape and dtype, or None
        Of the output, as the model states them; None for the loss.
    into : tuple of HandOver
        What it takes, by place.
    rows : list of int
        Rows of what is handed over at a module boundary, by place.
    cuts : list of (int, int) or None
        Rows of the output that each consumer takes, by place among them: the first, and how many; None: all. Empty
        where all take all.
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
    part_key: tuple[str, int, int]
    needs_part: bool
    is_first: bool
    is_last: bool
    trained: bool
    bounds: Bounds
    layer_numbers: tuple[int, int]
    stated: tuple[tuple[int, ...], torch.dtype] | None
    into: tuple[HandOver, ...] = ()
    rows: list[int] = field(default_factory=list)
    cuts: list[tuple[int, int] | None] = field(default_factory=list)
    groups: list[tuple[list[int], Module, bool]] = field(default_factory=list)
    arrived: list[Tensor | None] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    input_gradients: list[Tensor | None] = field(default_factory=list)
    local_consumers: list[tuple[int, UnitState, int]] = field(default_factory=list)
    local_producers: list[tuple[int, UnitState, int]] = field(default_factory=list)
    num_sends: int = 0
    output: Tensor | None = None
    passage: Passage | None = None
    leaves: list[Tensor] = field(default_factory=list)

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

    def take_gradient(self, device: torch.device) -> Tensor:
        """Gradient of the output: the sum of what all consumers sent back."""
        if self.cuts:
            return self._joined_gradient(device)
        total: Tensor | None = None
        for place, gradient in enumerate(self.gradients):
            if gradient is None:
                raise ExecutionError("the gradient it takes has not arrived; verify the plan")
            total = gradient if total is None else total + gradient
            self.gradients[place] = None
        # Where nobody takes the output, it has no effect on the loss.
        return self._joined_gradient(device) if total is None else total

    def _joined_gradient(self, device: torch.device) -> Tensor:
        """The same where consumers took parts of the output."""
        if self.stated is None:
            raise ExecutionError("its loss was not computed; verify the plan")
        shape, dtype = self.stated
        total = torch.zeros(shape, dtype=dtype, device=device)
        for place, (gradient, cut) in enumerate(zip(self.gradients, self.cuts, strict=True)):
            if gradient is None:
                raise ExecutionError("the gradient it takes has not arrived; verify the plan")
            (total if cut is None else total.narrow(0, *cut)).add_(gradient)
            self.gradients[place] = None
        return total

    def given(self, output: Tensor, place: int) -> Tensor:
        """What one consumer takes of the output."""
        cut = self.cuts[place] if self.cuts else None
        return output if cut is None else output.narrow(0, *cut)

    def split_input_gradients(self) -> None:
        """Cut the gradients of the upstream arguments into the pieces that were handed over."""
        for (places, _, flows), leaf in zip(self.groups, self.leaves, strict=True):
            if not flows or not places:
                continue
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
            if len(places) == 1:
                self.input_gradients[places[0]] = gradient
                continue
            begin = 0
            for place in places:
                self.input_gradients[place] = gradient.narrow(0, begin, self.rows[place])
                begin += self.rows[place]
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
            if tensor is not None:
                tensor = self.unit.given(tensor, self.place)
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

    def unlink(self) -> None:
        """Take the units apart: they refer to one another, and what they hold is to be freed at once."""
        for unit in self.units:
            unit.local_consumers, unit.local_producers = [], []


class Linker:
    """Links plans of one layout for one rank; what does not change between iterations is worked out here.

    Parameters
    ----------
    layout : Layout
    model : Model
    rank : int
    """

    def __init__(self, layout: Layout, model: Model, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.digest = layout.digest
        self.names = layout.chunk_names
        self.number_of = {name: i for i, name in enumerate(self.names)}
        self.router = Router(layout)
        self.shapes = boundary_shapes(model.spec, layout)
        self.modules = [model.module(chunk.module) for chunk in layout.chunks]
        self.columns = [model.module(module.name) for module in layout.modules]
        self.is_last = [
            module is model.modules[-1] and chunk.layers[1] == len(module.layers) - 1
            for chunk, module in zip(layout.chunks, self.modules, strict=True)
        ]
        self.fan_out = max(1, *(len(place.consumers) for place in self.router.places))

    def link(self, plan: ExecutionPlan, packing: Packing) -> Program:
        """Link one rank's actions.

        Raises
        ------
        ExecutionError
            When plan, packing, layout and model do not belong together.
        """
        if plan.layout != self.digest or plan.num_ranks != self.layout.num_ranks:
            raise ExecutionError(
                f"the plan is for layout {plan.layout} on {plan.num_ranks} ranks, this one is {self.digest} on "
                f"{self.layout.num_ranks}; plan for the layout that is run"
            )
        try:
            return _Link(self, plan, packing).program()
        except InputError as error:
            raise ExecutionError(f"the plan does not fit the packing: {error}") from error


class _Link:
    """One plan being linked."""

    def __init__(self, linker: Linker, plan: ExecutionPlan, packing: Packing) -> None:
        self.linker, self.plan, self.packing = linker, plan, packing
        units: list[Unit] = []
        if any(linker.router.replicated):
            # Only the plan says on which rank each part of a replicated module is worked on.
            units = [self._unit(a) for actions in plan.ranks for a in actions if a.verb == "F"]
        self.routes = linker.router.of(packing, units)
        self.max_parts = max((max(counts) for counts in self.routes.counts), default=1)
        self.fan_out = linker.fan_out * self.max_parts
        self.states: dict[Unit, UnitState] = {}
        self.messages: dict[tuple[str, Unit, str], MessageState] = {}
        """By verb of its post, producer, and consumer chunk where named."""

    def program(self) -> Program:
        actions = self.plan.ranks[self.linker.rank]
        for action in actions:
            if action.verb == "F":
                unit = self._unit(action)
                if unit.microbatch >= len(self.routes.counts):
                    raise ExecutionError(f"'{action_text(action)}': the batch has no such microbatch")
                self.states[unit] = self._state(unit, action.strategy)
        for unit, state in self.states.items():
            self._connect(unit, state)
        steps = [(action.verb, self._argument(action)) for action in actions]
        return Program(self.plan, self.packing, actions, steps, list(self.states.values()))

    def _unit(self, action: Action) -> Unit:
        number = self.linker.number_of.get(action.chunk)
        if number is None:
            raise ExecutionError(f"'{action_text(action)}': the layout has no chunk {action.chunk!r}")
        return Unit(number, action.microbatch, action.sub_microbatch)

    def _state(self, unit: Unit, strategy: str) -> UnitState:
        linker = self.linker
        chunk, module, place = (
            linker.layout.chunks[unit.chunk],
            linker.modules[unit.chunk],
            linker.router.places[unit.chunk],
        )
        into = self.routes.into(unit)
        is_last = linker.is_last[unit.chunk]
        state = UnitState(
            unit=unit,
            module=module,
            part_key=(module.name, unit.microbatch, unit.sub_microbatch),
            needs_part=is_last
            or module.context is not None
            or (place.before < 0 and module.inputs is not None),
            is_first=place.before < 0,
            is_last=is_last,
            trained=place.gradient,
            bounds=block_bounds(strategy, chunk.num_layers, is_last),
            layer_numbers=chunk.layers,
            stated=None if is_last else self._stated(unit),
            into=into,
            arrived=[None] * len(into),
            input_gradients=[None] * len(into),
        )
        if place.before >= 0:
            state.groups.append(([0], module, place.gradient))
        else:
            state.rows = [self._handed(hand_over)[0][0] for hand_over in into]
            places = linker.router.places
            for source in place.sources:
                taken = [i for i, h in enumerate(into) if places[h.producer.chunk].module == source]
                flows = places[linker.router.chunks_of[source][-1]].gradient
                state.groups.append((taken, linker.columns[source], flows))
        return state

    def _stated(self, unit: Unit) -> tuple[tuple[int, ...], torch.dtype]:
        parts = self.packing.microbatches[unit.microbatch].parts[self.linker.router.places[unit.chunk].module]
        if unit.sub_microbatch >= len(parts):
            raise ExecutionError(
                f"microbatch {unit.microbatch} has no part {unit.sub_microbatch} for its chunk"
            )
        shape, dtype = self.linker.shapes(unit.chunk, parts[unit.sub_microbatch].workload)
        return shape, torch_dtype(dtype)

    def _handed(self, hand_over: HandOver) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what is handed over."""
        if hand_over.piece is None:
            return self._stated(hand_over.producer)
        workload = handed_workload(hand_over, self.linker.layout, self.packing)
        shape, dtype = self.linker.shapes(hand_over.producer.chunk, workload)
        return shape, torch_dtype(dtype)

    def _cuts(self, given: Sequence[HandOver]) -> list[tuple[int, int] | None]:
        """Rows of a producer's output that each consumer takes; empty where all take all."""
        if all(hand_over.piece is None for hand_over in given):
            return []
        cuts: list[tuple[int, int] | None] = []
        for hand_over in given:
            if hand_over.piece is None:
                cuts.append(None)
                continue
            before = hand_over._replace(piece=(0, hand_over.piece[0]))
            cuts.append((self._handed(before)[0][0], self._handed(hand_over)[0][0]))
        return cuts

    def _connect(self, unit: Unit, state: UnitState) -> None:
        """Connect a unit to what it takes from and gives to: directly on this rank, else by messages."""
        for place, hand_over in enumerate(state.into):
            producer = self.states.get(hand_over.producer)
            siblings = self.routes.out_of(hand_over.producer)
            place_out = siblings.index(hand_over) if len(siblings) > 1 else 0
            if producer is None:
                self._add_messages(state, place, hand_over, place_out, siblings, receives=True)
                continue
            producer.local_consumers.append((place, state, place_out))
            if hand_over.gradient:
                state.local_producers.append((place, producer, place_out))
        given = self.routes.out_of(unit)
        state.gradients = [None] * len(given)
        state.cuts = self._cuts(given)
        for place, hand_over in enumerate(given):
            if hand_over.consumer not in self.states:
                self._add_messages(state, place, hand_over, place, given, receives=False)
                state.num_sends += 1

    def _add_messages(
        self,
        state: UnitState,
        place: int,
        hand_over: HandOver,
        place_out: int,
        siblings: Sequence[HandOver],
        *,
        receives: bool,
    ) -> None:
        linker, producer = self.linker, hand_over.producer
        target = target_word(hand_over, siblings, linker.names)
        peer = linker.layout.chunks[(producer if receives else hand_over.consumer).chunk].rank
        shape, dtype = self._handed(hand_over)
        number = producer.chunk * len(self.routes.counts) + producer.microbatch
        number = (number * self.max_parts + producer.sub_microbatch) * self.fan_out + place_out
        forward, backward = ("RF", "SB") if receives else ("SF", "RB")
        self.messages[forward, producer, target] = MessageState(
            state, place, False, peer, 2 * number, shape, dtype
        )
        if hand_over.gradient:
            self.messages[backward, producer, target] = MessageState(
                state, place, True, peer, 2 * number + 1, shape, dtype
            )

    def _argument(self, action: Action) -> UnitState | MessageState | int | None:
        verb = action.verb
        if verb == "OS":
            return None
        unit = self._unit(action)
        if verb in ("RG", "UN"):
            return unit.chunk
        if verb not in _POST_OF:
            if unit not in self.states:
                raise ExecutionError(f"'{action_text(action)}' has no F on rank {self.linker.rank}")
            return self.states[unit]
        message = self.messages.get((_POST_OF[verb], unit, action.target))
        if message is None:
            raise ExecutionError(
                f"'{action_text(action)}' is no message that rank {self.linker.rank} has to do with"
            )
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


_POST_OF = {"SF": "SF", "DF": "SF", "SB": "SB", "DB": "SB", "RF": "RF", "WF": "RF", "RB": "RB", "WB": "RB"}
"""Verb that posts the message which an action is about."""
