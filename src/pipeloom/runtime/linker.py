"""LinkedPlan: one rank's actions of one plan, linked to the units and messages that they work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pipeloom.errors import ExecutionError, InputError
from pipeloom.packing import Packing
from pipeloom.plan import (
    Action,
    BoundaryTransfer,
    ExecutionPlan,
    Router,
    Unit,
    Verb,
    action_text,
    boundary_shapes,
    joined_posts,
    target_word,
    transferred_workload,
)
from pipeloom.runtime.blocks import Bounds, block_bounds
from pipeloom.runtime.model import Model, Module, torch_dtype
from pipeloom.runtime.unit import ChunkRole, Key, MessageState, PartState, Stated, UnitState
from pipeloom.spec import Layout

# Shapes depend on few numbers and recur; a run over ever new lengths must not gather them for ever.
_MAX_KNOWN_SHAPES = 50_000


@dataclass(slots=True, eq=False)
class LinkedPlan:
    """Actions and what each works on: a `UnitState`, a `MessageState`, a chunk number, or None. Runs once."""

    plan: ExecutionPlan
    packing: Packing
    actions: tuple[Action, ...]
    arguments: Sequence[Any]
    units: Sequence[UnitState]
    was_run: bool = False

    def unlink(self) -> None:
        """Take the units apart: they refer to one another, and what they hold is to be freed at once."""
        for unit in self.units:
            unit.unlink()


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
        self.rank_of = [chunk.rank for chunk in layout.chunks]
        self.router = Router(layout)
        self.shapes = boundary_shapes(model.spec, layout)
        self.roles = [self._role(model, number) for number in range(len(layout.chunks))]
        self.fan_out = max(1, *(len(place.consumers) for place in self.router.places))
        self.known_shapes: list[dict[tuple[int, int], Stated]] = [{} for _ in layout.chunks]
        """By chunk, then by instances and tokens: all that shapes depend on."""
        self.known_bounds: list[dict[str, Bounds]] = [{} for _ in layout.chunks]
        """By chunk, then by strategy."""

    def _role(self, model: Model, number: int) -> ChunkRole:
        chunk, place = self.layout.chunks[number], self.router.places[number]
        module = model.module(chunk.module)
        is_last = module is model.modules[-1] and chunk.layers[1] == len(module.layers) - 1
        first_chunks = self.router.chunks_of
        return ChunkRole(
            module=module,
            column=place.module,
            before=place.before,
            after=place.after,
            sources=tuple(
                (
                    source,
                    model.module(self.layout.modules[source].name),
                    self.router.places[first_chunks[source][-1]].gradient,
                )
                for source in place.sources
            ),
            feeds=bool(place.consumers),
            trained=place.gradient,
            is_last=is_last,
            needs_part=is_last or module.context is not None or (place.before < 0 and module.inputs is not None),
            layer_numbers=chunk.layers,
        )

    def link(self, plan: ExecutionPlan, packing: Packing, *, joins: bool = False) -> LinkedPlan:
        """Link one rank's actions; where wanted, find out which messages are posted together.

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
        if sum(map(len, self.known_shapes)) > _MAX_KNOWN_SHAPES:
            for known in self.known_shapes:
                known.clear()
        try:
            linked = _Link(self, plan, packing).linked()
        except InputError as error:
            raise ExecutionError(f"the plan does not fit the packing: {error}") from error
        for step in joined_posts(plan, self.rank) if joins else ():
            linked.arguments[step].joins_next = True
        return linked


class _Crossing(NamedTuple):
    """A boundary transfer between modules as its producer knows it."""

    producer: Key
    gradient: bool
    place_out: int = 0
    """Among the producer's consumers."""
    target: str = ""
    """How messages name the consumer."""
    cut: Stated | None = None
    """Shape and dtype where it is not the whole output."""


class _Link:
    """One plan being linked. Inside modules, where most units are, without going through `BoundaryTransfer`."""

    def __init__(self, linker: Linker, plan: ExecutionPlan, packing: Packing) -> None:
        self.linker, self.plan, self.packing = linker, plan, packing
        units: list[Unit] = []
        if any(linker.router.replicated):
            # Only the plan says on which rank each part of a replicated module is worked on.
            units = [Unit(*self._key(a)) for actions in plan.ranks for a in actions if a.verb == "F"]
        self.routes = linker.router.of(packing, units)
        self.num_microbatches = len(packing.microbatches)
        self.max_parts = max(map(max, self.routes.counts), default=1)
        self.fan_out = linker.fan_out * self.max_parts
        self.sizes: dict[tuple[int, int, int], tuple[int, int]] = {}
        """By module, microbatch and part: instances and tokens."""
        self.parts: dict[tuple[int, int, int], PartState] = {}
        self.states: dict[Key, UnitState] = {}
        self.messages: dict[tuple[Verb, Key, str], MessageState] = {}
        """By verb of its post, producer, and consumer where named."""

    def linked(self) -> LinkedPlan:
        # Most of what linking costs is here, once for every action: hence the names bound outside of the loop.
        linker, states, number_of = self.linker, self.states, self.linker.number_of
        actions = self.plan.ranks[linker.rank]
        arguments: list[Any] = []
        messages: list[tuple[int, Action, Key]] = []
        forward, optimizer_step = Verb.F, Verb.OPTIMIZER_STEP
        for action in actions:
            verb = action.verb
            if verb is optimizer_step:
                arguments.append(None)
                continue
            number = number_of.get(action.chunk)
            if number is None:
                raise ExecutionError(f"'{action_text(action)}': the layout has no chunk {action.chunk!r}")
            key = (number, action.microbatch, action.sub_microbatch)
            if verb is forward:
                state = states[key] = self._state(key, action)
                arguments.append(state)
            elif verb.is_unit:
                known = states.get(key)
                if known is None:
                    raise ExecutionError(f"'{action_text(action)}' has no F before it on rank {linker.rank}")
                arguments.append(known)
            elif verb.is_message:
                messages.append((len(arguments), action, key))
                arguments.append(None)
            else:
                arguments.append(number)
        for key, state in states.items():
            self._connect(key, state)
        for at, action, key in messages:
            arguments[at] = self._message_of(action, key)
        return LinkedPlan(self.plan, self.packing, actions, arguments, tuple(states.values()))

    def _key(self, action: Action) -> Key:
        number = self.linker.number_of.get(action.chunk)
        if number is None:
            raise ExecutionError(f"'{action_text(action)}': the layout has no chunk {action.chunk!r}")
        return (number, action.microbatch, action.sub_microbatch)

    def _state(self, key: Key, action: Action) -> UnitState:
        chunk, microbatch, sub = key
        if microbatch >= self.num_microbatches:
            raise ExecutionError(f"'{action_text(action)}': the batch has no such microbatch")
        role = self.linker.roles[chunk]
        part = None
        if role.needs_part:
            part_key = (role.column, microbatch, sub)
            part = self.parts.get(part_key)
            if part is None:
                part = self.parts[part_key] = PartState(role.module, microbatch, sub)
            part.num_users += 1
        bounds = self.linker.known_bounds[chunk].get(action.strategy)
        if bounds is None:
            first, last = role.layer_numbers
            bounds = block_bounds(action.strategy, last - first + 1, role.is_last)
            self.linker.known_bounds[chunk][action.strategy] = bounds
        # Asked for the last one too, where it is not used: a part that does not exist is found here.
        stated: Stated | None = self._stated(key)
        if role.is_last:
            stated = None
        gradients: list[Tensor | None] = [] if role.after < 0 else [None]
        if role.before >= 0:
            return UnitState(key, role, part, bounds, stated, [None], [None], None, gradients)
        if not role.sources:
            return UnitState(key, role, part, bounds, stated, _NONE, _NONE, _NO_GROUPS, gradients)
        into = self.routes.into(Unit(*key))
        groups = []
        for source, module, flows in role.sources:
            places = self.linker.router.places
            taken = [i for i, h in enumerate(into) if places[h.producer.chunk].module == source]
            groups.append((taken, module, flows))
        state = UnitState(key, role, part, bounds, stated, [None] * len(into), [None] * len(into), groups, gradients)
        state.rows = [self._transferred(transfer)[0][0] for transfer in into]
        return state

    def _stated(self, key: Key) -> Stated:
        """Shape and dtype of a unit's whole output."""
        chunk, microbatch, sub = key
        column = self.linker.roles[chunk].column
        size = self.sizes.get((column, microbatch, sub))
        if size is None:
            parts = self.packing.microbatches[microbatch].parts[column]
            if sub >= len(parts):
                raise ExecutionError(f"microbatch {microbatch} has no part {sub} for its chunk")
            lengths = parts[sub].workload.lengths
            size = self.sizes[column, microbatch, sub] = (len(lengths), sum(lengths))
        stated = self.linker.known_shapes[chunk].get(size)
        if stated is None:
            workload = self.packing.microbatches[microbatch].parts[column][sub].workload
            shape, dtype = self.linker.shapes(chunk, workload)
            stated = self.linker.known_shapes[chunk][size] = (shape, torch_dtype(dtype))
        return stated

    def _transferred(self, transfer: BoundaryTransfer) -> Stated:
        """Shape and dtype of what is transferred."""
        if transfer.piece is None:
            return self._stated(transfer.producer)
        workload = transferred_workload(transfer, self.linker.layout, self.packing)
        shape, dtype = self.linker.shapes(transfer.producer.chunk, workload)
        return shape, torch_dtype(dtype)

    def _cuts(self, given: Sequence[BoundaryTransfer]) -> list[tuple[int, int] | None] | None:
        """Rows of a producer's output that each consumer takes; None where all take all."""
        if all(transfer.piece is None for transfer in given):
            return None
        cuts: list[tuple[int, int] | None] = []
        for transfer in given:
            if transfer.piece is None:
                cuts.append(None)
                continue
            before = transfer._replace(piece=(0, transfer.piece[0]))
            cuts.append((self._transferred(before)[0][0], self._transferred(transfer)[0][0]))
        return cuts

    def _connect(self, key: Key, state: UnitState) -> None:
        """Connect a unit to what it takes from and gives to: directly on this rank, else by messages."""
        role, (_, microbatch, sub) = state.role, key
        if role.before >= 0:
            source = (role.before, microbatch, sub)
            above = self.states.get(source)
            if above is None:
                peer = self.linker.rank_of[role.before]
                self._message(state, 0, _Crossing(source, role.trained), peer, True)
            else:
                above.below = state
                if role.trained:
                    state.above = above
        elif role.sources:
            for place, transfer in enumerate(self.routes.into(Unit(*key))):
                siblings = self.routes.out_of(transfer.producer)
                place_out = siblings.index(transfer) if len(siblings) > 1 else 0
                target = target_word(transfer, siblings, self.linker.names)
                cut = None if transfer.piece is None else self._transferred(transfer)
                self._take(state, place, _Crossing(transfer.producer, transfer.gradient, place_out, target, cut))
        if role.after >= 0:
            if (role.after, microbatch, sub) not in self.states:
                self._message(state, 0, _Crossing(key, role.trained), self.linker.rank_of[role.after], False)
                state.num_sends = 1
            return
        if not role.feeds:
            return
        given = self.routes.out_of(Unit(*key))
        state.gradients = [None] * len(given)
        state.cuts = self._cuts(given)
        for place, transfer in enumerate(given):
            if transfer.consumer not in self.states:
                target = target_word(transfer, given, self.linker.names)
                peer = self.linker.rank_of[transfer.consumer.chunk]
                cut = None if transfer.piece is None else self._transferred(transfer)
                self._message(state, place, _Crossing(key, transfer.gradient, place, target, cut), peer, False)
                state.num_sends += 1

    def _take(self, state: UnitState, place: int, crossing: _Crossing) -> None:
        """Connect a unit to one producer of another module."""
        producer = self.states.get(crossing.producer)
        if producer is None:
            self._message(state, place, crossing, self.linker.rank_of[crossing.producer[0]], True)
            return
        if producer.local_consumers is None:
            producer.local_consumers = []
        producer.local_consumers.append((place, state, crossing.place_out))
        if crossing.gradient:
            if state.local_producers is None:
                state.local_producers = []
            state.local_producers.append((place, producer, crossing.place_out))

    def _message(self, state: UnitState, place: int, crossing: _Crossing, peer: int, receives: bool) -> None:
        """Make this rank's end of an activation's message, and of its gradient's."""
        producer, gradient, place_out, target, cut = crossing
        shape, dtype = self._stated(producer) if cut is None else cut
        chunk, microbatch, sub = producer
        number = chunk * self.num_microbatches + microbatch
        tag = 2 * ((number * self.max_parts + sub) * self.fan_out + place_out)
        forward, backward = (Verb.RECV_F, Verb.SEND_B) if receives else (Verb.SEND_F, Verb.RECV_B)
        self.messages[forward, producer, target] = MessageState(state, place, False, peer, tag, shape, dtype)
        if gradient:
            self.messages[backward, producer, target] = MessageState(state, place, True, peer, tag + 1, shape, dtype)

    def _message_of(self, action: Action, key: Key) -> MessageState:
        """What an action about a message works on."""
        message = self.messages.get((action.verb.post, key, action.target))
        if message is None:
            raise ExecutionError(f"'{action_text(action)}' is no message that rank {self.linker.rank} has to do with")
        if action.shape is not None and (
            action.shape != message.shape or torch_dtype(action.dtype) != message.dtype or action.peer != message.peer
        ):
            raise ExecutionError(
                f"'{action_text(action)}': the model states {message.shape} {message.dtype} with rank "
                f"{message.peer}; plan with the model and the batch that are run"
            )
        return message


_NONE: list[Tensor | None] = []
_NO_GROUPS: list[tuple[list[int], Module, bool]] = []
"""Of units that take nothing from others; nothing is ever put into these."""
