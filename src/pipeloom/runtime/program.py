"""Program: one rank's actions of one plan, linked to the units and messages that they work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    joined_posts,
    target_word,
)
from pipeloom.runtime.blocks import Bounds, block_bounds
from pipeloom.runtime.model import Model, Module, torch_dtype
from pipeloom.runtime.unit import ChunkRole, Key, MessageState, PartState, Stated, UnitState
from pipeloom.spec import Layout

# Shapes depend on few numbers and recur; a run over ever new lengths must not gather them for ever.
_MAX_KNOWN_SHAPES = 50_000


@dataclass(slots=True, eq=False)
class Program:
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
            needs_part=is_last
            or module.context is not None
            or (place.before < 0 and module.inputs is not None),
            layer_numbers=chunk.layers,
        )

    def link(self, plan: ExecutionPlan, packing: Packing, *, joins: bool = False) -> Program:
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
            program = _Link(self, plan, packing).program()
        except InputError as error:
            raise ExecutionError(f"the plan does not fit the packing: {error}") from error
        for step in joined_posts(plan, self.rank) if joins else ():
            program.arguments[step].joins_next = True
        return program


class _Link:
    """One plan being linked. Inside modules, where most units are, without going through `HandOver`."""

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
        self.messages: dict[tuple[str, Key, str], MessageState] = {}
        """By verb of its post, producer, and consumer where named."""

    def program(self) -> Program:
        # Most of what linking costs is here, once for every action: hence the names bound outside of the loop.
        linker, states, number_of = self.linker, self.states, self.linker.number_of
        actions = self.plan.ranks[linker.rank]
        arguments: list[Any] = []
        messages: list[tuple[int, Action, Key]] = []
        for action in actions:
            verb = action.verb
            if verb == "OS":
                arguments.append(None)
                continue
            number = number_of.get(action.chunk)
            if number is None:
                raise ExecutionError(f"'{action_text(action)}': the layout has no chunk {action.chunk!r}")
            key = (number, action.microbatch, action.sub_microbatch)
            if verb == "F":
                state = states[key] = self._state(key, action)
                arguments.append(state)
            elif verb in _OF_UNITS:
                known = states.get(key)
                if known is None:
                    raise ExecutionError(f"'{action_text(action)}' has no F before it on rank {linker.rank}")
                arguments.append(known)
            elif verb in _POST_OF:
                messages.append((len(arguments), action, key))
                arguments.append(None)
            elif verb in _OF_CHUNKS:
                arguments.append(number)
            else:
                raise ExecutionError(f"'{action_text(action)}': this runtime has no action {verb!r}")
        for key, state in states.items():
            self._connect(key, state)
        for at, action, key in messages:
            arguments[at] = self._message_of(action, key)
        return Program(self.plan, self.packing, actions, arguments, tuple(states.values()))

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
        state = UnitState(
            key, role, part, bounds, stated, [None] * len(into), [None] * len(into), groups, gradients
        )
        state.rows = [self._handed(hand_over)[0][0] for hand_over in into]
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

    def _handed(self, hand_over: HandOver) -> Stated:
        """Shape and dtype of what is handed over."""
        if hand_over.piece is None:
            return self._stated(hand_over.producer)
        workload = handed_workload(hand_over, self.linker.layout, self.packing)
        shape, dtype = self.linker.shapes(hand_over.producer.chunk, workload)
        return shape, torch_dtype(dtype)

    def _cuts(self, given: Sequence[HandOver]) -> list[tuple[int, int] | None] | None:
        """Rows of a producer's output that each consumer takes; None where all take all."""
        if all(hand_over.piece is None for hand_over in given):
            return None
        cuts: list[tuple[int, int] | None] = []
        for hand_over in given:
            if hand_over.piece is None:
                cuts.append(None)
                continue
            before = hand_over._replace(piece=(0, hand_over.piece[0]))
            cuts.append((self._handed(before)[0][0], self._handed(hand_over)[0][0]))
        return cuts

    def _connect(self, key: Key, state: UnitState) -> None:
        """Connect a unit to what it takes from and gives to: directly on this rank, else by messages."""
        role, (_, microbatch, sub) = state.role, key
        if role.before >= 0:
            source = (role.before, microbatch, sub)
            above = self.states.get(source)
            if above is None:
                peer = self.linker.rank_of[role.before]
                self._message(state, 0, source, role.trained, peer, 0, "", None, True)
            else:
                above.below = state
                if role.trained:
                    state.above = above
        elif role.sources:
            for place, hand_over in enumerate(self.routes.into(Unit(*key))):
                siblings = self.routes.out_of(hand_over.producer)
                place_out = siblings.index(hand_over) if len(siblings) > 1 else 0
                target = target_word(hand_over, siblings, self.linker.names)
                handed = None if hand_over.piece is None else self._handed(hand_over)
                self._take(state, place, hand_over.producer, hand_over.gradient, place_out, target, handed)
        if role.after >= 0:
            if (role.after, microbatch, sub) not in self.states:
                self._message(
                    state, 0, key, role.trained, self.linker.rank_of[role.after], 0, "", None, False
                )
                state.num_sends = 1
            return
        if not role.feeds:
            return
        given = self.routes.out_of(Unit(*key))
        state.gradients = [None] * len(given)
        state.cuts = self._cuts(given)
        for place, hand_over in enumerate(given):
            if hand_over.consumer not in self.states:
                target = target_word(hand_over, given, self.linker.names)
                peer = self.linker.rank_of[hand_over.consumer.chunk]
                handed = None if hand_over.piece is None else self._handed(hand_over)
                self._message(state, place, key, hand_over.gradient, peer, place, target, handed, False)
                state.num_sends += 1

    def _take(
        self,
        state: UnitState,
        place: int,
        source: Key,
        gradient: bool,
        place_out: int,
        target: str,
        handed: Stated | None,
    ) -> None:
        """Connect a unit to one producer of another module."""
        producer = self.states.get(source)
        if producer is None:
            peer = self.linker.rank_of[source[0]]
            self._message(state, place, source, gradient, peer, place_out, target, handed, True)
            return
        if producer.local_consumers is None:
            producer.local_consumers = []
        producer.local_consumers.append((place, state, place_out))
        if gradient:
            if state.local_producers is None:
                state.local_producers = []
            state.local_producers.append((place, producer, place_out))

    def _message(
        self,
        state: UnitState,
        place: int,
        producer: Key,
        gradient: bool,
        peer: int,
        place_out: int,
        target: str,
        handed: Stated | None,
        receives: bool,
    ) -> None:
        """Make this rank's end of an activation's message, and of its gradient's."""
        shape, dtype = self._stated(producer) if handed is None else handed
        chunk, microbatch, sub = producer
        number = chunk * self.num_microbatches + microbatch
        tag = 2 * ((number * self.max_parts + sub) * self.fan_out + place_out)
        forward, backward = ("RF", "SB") if receives else ("SF", "RB")
        self.messages[forward, producer, target] = MessageState(state, place, False, peer, tag, shape, dtype)
        if gradient:
            self.messages[backward, producer, target] = MessageState(
                state, place, True, peer, tag + 1, shape, dtype
            )

    def _message_of(self, action: Action, key: Key) -> MessageState:
        """What an action about a message works on."""
        message = self.messages.get((_POST_OF[action.verb], key, action.target))
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
_OF_UNITS = frozenset({"B", "I", "W", "RC", "OF", "LD"})
_OF_CHUNKS = frozenset({"RG", "UN"})
_NONE: list[Tensor | None] = []
_NO_GROUPS: list[tuple[list[int], Module, bool]] = []
"""Of units that take nothing from others; nothing is ever put into these."""
