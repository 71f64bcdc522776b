"""LinkedPlan: the actions of one rank, linked to the units and messages that they use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pipeloom.errors import ExecutionError, InputError, PlanError
from pipeloom.packing import Packing
from pipeloom.plan import (
    Action,
    BoundaryTransfer,
    ExecutionPlan,
    RankPlan,
    Router,
    Unit,
    Verb,
    action_text,
    boundary_shapes,
    rank_plan,
    target_word,
    transferred_workload,
    verify,
)
from pipeloom.plan.routes import StreamPlace
from pipeloom.runtime.execute.blocks import NO_STREAMS, ChunkStreams, block_bounds
from pipeloom.runtime.execute.unit import ChunkRole, Key, MessageState, Outlet, PartState, ShapeDtype, UnitState
from pipeloom.runtime.launch.transport import BatchedTransport, Transport, batches_p2p
from pipeloom.runtime.model.encoder_dp import ChunkInput, EncoderDataParallel, InstanceShare
from pipeloom.runtime.model.model import Model, Module, torch_dtype
from pipeloom.spec import Layout, TensorShape, Workload

# Shapes depend on few numbers and recur. The limit bounds the cache if lengths keep changing.
_MAX_KNOWN_SHAPES = 50_000


@dataclass(slots=True, eq=False)
class LinkedPlan:
    """Actions and their arguments. It can run only once.

    The argument of an action is a `UnitState`, a `MessageState`, a chunk number, or None.
    """

    plan: RankPlan
    packing: Packing
    actions: tuple[Action, ...]
    arguments: Sequence[Any]
    units: Sequence[UnitState]
    was_run: bool = False

    def unlink(self) -> None:
        """Clear references between units, so that their memory is freed at once."""
        for unit in self.units:
            unit.unlink()


class ChunkShapes:
    """Output shapes and dtypes of chunks, cached over iterations."""

    def __init__(self, model: Model, layout: Layout) -> None:
        self._shapes = boundary_shapes(model.spec, layout)
        self._known: list[dict[tuple[int, ...], ShapeDtype]] = [{} for _ in layout.chunks]
        """By chunk, then by the numbers of instances and tokens, or by the lengths if the shape depends on them."""
        self._by_lengths = [
            not model.module(chunk.module).spec.flat_layers[chunk.layers[1]].output.is_simple for chunk in layout.chunks
        ]

    def limit(self) -> None:
        """Clear the cache if it has grown large."""
        if sum(map(len, self._known)) > _MAX_KNOWN_SHAPES:
            for known in self._known:
                known.clear()

    def output(self, chunk: int, workload: Workload, size: tuple[int, int]) -> ShapeDtype:
        """Return shape and dtype of a chunk's whole output.

        ``size`` has the numbers of instances and tokens of the workload.
        """
        key = workload.lengths if self._by_lengths[chunk] else size
        known = self._known[chunk].get(key)
        if known is None:
            known = self._known[chunk][key] = self.of(chunk, workload, "")
        return known

    def of(self, chunk: int, workload: Workload, stream: str) -> ShapeDtype:
        """Return shape and dtype of a chunk's output, or of a stream that it emits."""
        shape, dtype = self._shapes(chunk, workload, stream)
        return shape, torch_dtype(dtype)


def check_serial(plan: ExecutionPlan) -> None:
    """Raise `InputError` if a plan was made for another backend than NCCL. One plan is enough to detect it."""
    try:
        verify(plan, single_communicator=True)
    except PlanError as error:
        raise InputError(
            "planner",
            f"makes plans that may deadlock with NCCL ({str(error).splitlines()[0]})",
            'give its PlanningProblem backend="nccl"',
        ) from error


class Linker:
    """Links plans of one layout for one rank. It holds all data that do not change between iterations."""

    def __init__(
        self, layout: Layout, model: Model, rank: int, encoder_dp: EncoderDataParallel, transport: Transport
    ) -> None:
        self.batches_p2p = batches_p2p(transport)
        self.is_unchecked = isinstance(transport, BatchedTransport)
        """Whether the first plan of all ranks is still to be checked for a single communicator."""
        self.layout, self.rank, self.encoder_dp = layout, rank, encoder_dp
        self.digest = layout.digest
        self.names = layout.chunk_names
        self.number_of = {name: i for i, name in enumerate(self.names)}
        self.router = Router(layout)
        self.shapes = ChunkShapes(model, layout)
        self.roles = [self._role(model, number) for number in range(len(layout.chunks))]
        self.fan_out = max(
            1, *(len(place.consumers) + (place.after >= 0) + len(place.gives) for place in self.router.places)
        )

    def _role(self, model: Model, number: int) -> ChunkRole:
        chunk, place = self.layout.chunks[number], self.router.places[number]
        module = model.module(chunk.module)
        is_last = module is model.modules[-1] and chunk.layers[1] == len(module.layers) - 1
        first_chunks = self.router.chunks_of
        streams = {end.stream: end for each in model.spec.modules for end in each.emits}
        return ChunkRole(
            module=module,
            column=place.module,
            before=place.before,
            after=place.after,
            sources=tuple(
                (
                    source,
                    model.module(self.layout.modules[source].name).spec.layers[-1].output,
                    self.router.places[first_chunks[source][-1]].gradient,
                )
                for source in place.sources
            ),
            feeds=bool(place.consumers),
            trained=place.gradient,
            is_last=is_last,
            needs_part=is_last or module.context is not None or (place.before < 0 and module.inputs is not None),
            layer_numbers=chunk.layers,
            ports=self._ports(module, chunk.layers, place.gives),
            takes=tuple(
                (stream, streams[stream].output, self.router.places[first_chunks[source][0]].gradient)
                for stream, source, _ in place.takes
            ),
        )

    def _ports(self, module: Module, layers: tuple[int, int], gives: tuple[StreamPlace, ...]) -> ChunkStreams:
        """Return the streams of a chunk's layers."""
        begin, end = layers
        takes: dict[int, tuple[str, ...]] = {}
        emits: dict[int, tuple[str, ...]] = {}
        for ends, by_layer in ((module.spec.takes, takes), (module.spec.emits, emits)):
            for each in ends:
                if begin <= each.layer <= end:
                    by_layer[each.layer - begin] = (*by_layer.get(each.layer - begin, ()), each.stream)
        if not takes and not emits:
            return NO_STREAMS
        return ChunkStreams(takes, emits, frozenset(place.stream for place in gives), begin, module.name)

    def link(self, plan: ExecutionPlan | RankPlan, packing: Packing) -> LinkedPlan:
        """Link one rank's actions.

        Raises `ExecutionError` if plan, packing, layout and model do not belong together, and `InputError` if the plan
        may deadlock in a single communicator.
        """
        if plan.layout != self.digest or plan.num_ranks != self.layout.num_ranks:
            raise ExecutionError(
                f"the plan is for layout {plan.layout} on {plan.num_ranks} ranks, but this layout is {self.digest} on "
                f"{self.layout.num_ranks} ranks; make a plan for this layout"
            )
        if self.is_unchecked and isinstance(plan, ExecutionPlan):
            check_serial(plan)
            self.is_unchecked = False
        self.shapes.limit()
        own_plan = plan
        if not isinstance(own_plan, RankPlan):
            own_plan = rank_plan(own_plan, self.layout, self.rank, batches_p2p=self.batches_p2p)
        if own_plan.rank != self.rank or (self.batches_p2p and own_plan.joined is None):
            raise ExecutionError(
                f"the plan is rank {own_plan.rank}'s, "
                + ("made for messages that are not batched" if own_plan.rank == self.rank else f"not {self.rank}'s")
                + "; deliver it with delivery_of for the backend that runs"
            )
        try:
            linked = _Link(self, own_plan, packing).linked()
        except InputError as error:
            raise ExecutionError(f"the plan does not fit the packing: {error}") from error
        for step in (own_plan.joined or ()) if self.batches_p2p else ():
            linked.arguments[step].joins_next = True
        return linked


class _Crossing(NamedTuple):
    """A boundary transfer between modules, as seen by its producer."""

    producer: Key
    gradient: bool
    place_out: int = 0
    """Index among the consumers of the same output or stream."""
    target: str = ""
    """Name of the consumer in messages."""
    cut: ShapeDtype | None = None
    """Shape and dtype if it is not the whole output."""
    stream: str = ""
    number: int = 0
    """Index among all transfers of the producer."""


class _Link:
    """A plan that is being linked.

    Transfers inside modules, the most frequent ones, bypass `BoundaryTransfer` for speed.
    """

    def __init__(self, linker: Linker, plan: RankPlan, packing: Packing) -> None:
        self.linker, self.plan, self.packing = linker, plan, packing
        self.routes = linker.router.of(packing, plan.placed)
        self.num_microbatches = len(packing.microbatches)
        self.max_parts = max(map(max, self.routes.counts), default=1)
        self.fan_out = linker.fan_out * self.max_parts
        self.sizes: dict[tuple[int, int, int], tuple[Workload, tuple[int, int]]] = {}
        """Workload, number of instances and number of tokens, by module, microbatch and sub-microbatch."""
        self.parts: dict[tuple[int, int, int], PartState] = {}
        self.states: dict[Key, UnitState] = {}
        self.messages: dict[tuple[Verb, Key, str, str], MessageState] = {}
        """Messages by verb of the post, producer, consumer if it is named, and stream."""

    def linked(self) -> LinkedPlan:
        # This loop over all actions dominates the cost of linking, so attributes are looked up outside of it.
        linker, states, number_of = self.linker, self.states, self.linker.number_of
        actions = self.plan.actions
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

    def _state(self, key: Key, action: Action) -> UnitState:
        chunk, microbatch, sub = key
        if microbatch >= self.num_microbatches:
            raise ExecutionError(f"'{action_text(action)}': the batch has no such microbatch")
        role = self.linker.roles[chunk]
        # The last chunk does not use the shape, but computing it detects a part that does not exist.
        declared: ShapeDtype | None = self._declared(key)
        part, share = None, self._share(key) if role.module.name in self.linker.encoder_dp.names else None
        if role.needs_part and (share is None or share.instances[1]):
            part_key = (role.column, microbatch, sub)
            part = self.parts.get(part_key)
            if part is None:
                own = None if share is None else share.instances
                part = self.parts[part_key] = PartState(role.module, microbatch, sub, own)
            part.num_users += 1
            part.contents |= role.before < 0
            part.loss |= role.is_last
        first, last = role.layer_numbers
        bounds = block_bounds(action.strategy, last - first + 1, role.is_last)
        if role.is_last:
            declared = None
        gradients: list[Tensor | None] = [] if role.after < 0 else [None]
        into: Sequence[BoundaryTransfer] = ()
        groups, num_taken = None, 1
        if role.before < 0 or role.takes:
            into = self.routes.into(Unit(*key)) if role.sources or role.takes else ()
            groups, num_taken = self._groups(role, into), len(into)
        waiting: list[Tensor | None] = [None] * num_taken
        state = UnitState(
            key, role, part, bounds, waiting, waiting.copy(), groups, share, declared=declared, gradients=gradients
        )
        if role.ports.gives:
            self._outlets(key, state)
        return state

    def _share(self, key: Key) -> InstanceShare:
        """Return this tensor-parallel rank's share of a unit under encoder data parallelism."""
        linker, (chunk, microbatch, sub) = self.linker, key
        role, members = linker.roles[chunk], self.packing.microbatches[microbatch]
        layers = role.module.spec.flat_layers
        encoder_dp = linker.encoder_dp
        if role.before >= 0:
            inputs = [ChunkInput(layers[role.layer_numbers[0] - 1].output)]
        else:
            samples = [self.packing.batch.samples[i] for i in members.samples]
            sources = ((linker.layout.modules[source].name, shape) for source, shape, _ in role.sources)
            inputs = [ChunkInput(shape, encoder_dp.model.module(name), samples) for name, shape in sources]
        part = members.parts[role.column][sub]
        return encoder_dp.share(role.module.spec, part, layers[role.layer_numbers[1]].output, inputs)

    def _groups(self, role: ChunkRole, into: Sequence[BoundaryTransfer]) -> list[tuple[list[int], TensorShape, bool]]:
        """Return the transfers that a unit takes, grouped by argument and stream."""
        places = self.linker.router.places
        groups: list[tuple[list[int], TensorShape, bool]] = []
        if role.before >= 0:
            groups.append(([0], _ANY_SHAPE, role.trained))
        for source, shape, flows in role.sources:
            taken = [i for i, h in enumerate(into) if not h.stream and places[h.producer.chunk].module == source]
            groups.append((taken, shape, flows))
        for stream, shape, flows in role.takes:
            groups.append(([i for i, h in enumerate(into) if h.stream == stream], shape, flows))
        return groups

    def _outlets(self, key: Key, state: UnitState) -> None:
        """Make the outlets of a unit for streams. Consumers are connected later."""
        chunk, microbatch, sub = key
        workload = self.packing.microbatches[microbatch].parts[state.role.column][sub].workload
        transfers = self.routes.out_of(Unit(*key))
        state.outlets = {}
        for stream in dict.fromkeys(place.stream for place in self.linker.router.places[chunk].gives):
            takers = [transfer for transfer in transfers if transfer.stream == stream]
            shape = self.linker.shapes.of(chunk, workload, stream)
            state.outlets[stream] = Outlet(declared=shape, gradients=[None] * len(takers), cuts=self._cuts(takers))

    def _declared(self, key: Key) -> ShapeDtype:
        """Return shape and dtype of a unit's whole output."""
        chunk, microbatch, sub = key
        column = self.linker.roles[chunk].column
        known = self.sizes.get((column, microbatch, sub))
        if known is None:
            parts = self.packing.microbatches[microbatch].parts[column]
            if sub >= len(parts):
                raise ExecutionError(f"microbatch {microbatch} has no part {sub} for its chunk")
            workload = parts[sub].workload
            known = workload, (len(workload.lengths), sum(workload.lengths))
            self.sizes[column, microbatch, sub] = known
        return self.linker.shapes.output(chunk, *known)

    def _transferred(self, transfer: BoundaryTransfer) -> ShapeDtype:
        """Return shape and dtype of a transferred tensor."""
        if transfer.piece is None and not transfer.stream:
            return self._declared(transfer.producer)
        workload = transferred_workload(transfer, self.linker.layout, self.packing)
        return self.linker.shapes.of(transfer.producer.chunk, workload, transfer.stream)

    def _cuts(self, transfers: Sequence[BoundaryTransfer]) -> list[tuple[int, int] | None] | None:
        """Return the rows of a producer's output that each consumer takes. None if all consumers take all rows."""
        if all(transfer.piece is None for transfer in transfers):
            return None
        cuts: list[tuple[int, int] | None] = []
        for transfer in transfers:
            if transfer.piece is None:
                cuts.append(None)
                continue
            before = transfer._replace(piece=(0, transfer.piece[0]))
            cuts.append((self._transferred(before)[0][0], self._transferred(transfer)[0][0]))
        return cuts

    def _connect(self, key: Key, state: UnitState) -> None:
        """Connect a unit to its producers and consumers, directly on this rank and by messages to others."""
        role, (_, microbatch, sub) = state.role, key
        if role.before >= 0:
            source = (role.before, microbatch, sub)
            above = self.states.get(source)
            if above is None:
                self._message(state, 0, _Crossing(source, role.trained), role.before, True)
            else:
                above.below = state
                if role.trained:
                    state.above = above
        if role.sources or role.takes:
            for place, transfer in enumerate(self.routes.into(Unit(*key))):
                if role.before < 0 or transfer.stream:
                    siblings = self.routes.out_of(transfer.producer)
                    self._take(state, place, self._crossing(transfer, siblings))
        if role.after >= 0:
            if (role.after, microbatch, sub) not in self.states:
                self._message(state, 0, _Crossing(key, role.trained), role.after, False)
                state.num_sends = 1
            if state.outlets is None:
                return
        elif not role.feeds and state.outlets is None:
            return
        transfers = self.routes.out_of(Unit(*key))
        if role.after < 0:
            outputs = [transfer for transfer in transfers if not transfer.stream]
            state.gradients = [None] * len(outputs)
            state.cuts = self._cuts(outputs)
        for transfer in transfers:
            if (role.after < 0 or transfer.stream) and transfer.consumer not in self.states:
                crossing = self._crossing(transfer, transfers)
                self._message(state, crossing.place_out, crossing, transfer.consumer.chunk, False)
                self._outlet(state, crossing).num_sends += 1

    def _crossing(self, transfer: BoundaryTransfer, siblings: Sequence[BoundaryTransfer]) -> _Crossing:
        """Return a transfer as its producer sees it, among all transfers of the producer."""
        number = siblings.index(transfer) if len(siblings) > 1 else 0
        place_out = number
        if transfer.stream:
            place_out = [each for each in siblings if each.stream == transfer.stream].index(transfer)
        target = target_word(transfer, siblings, self.linker.names)
        cut = None if transfer.piece is None and not transfer.stream else self._transferred(transfer)
        return _Crossing(transfer.producer, transfer.gradient, place_out, target, cut, transfer.stream, number)

    @staticmethod
    def _outlet(state: UnitState, crossing: _Crossing) -> Outlet:
        """Return the outlet of a unit that a transfer uses."""
        return state.outlets[crossing.stream] if crossing.stream and state.outlets else state

    def _take(self, state: UnitState, place: int, crossing: _Crossing) -> None:
        """Connect a unit to one outlet of another chunk."""
        producer = self.states.get(crossing.producer)
        if producer is None:
            self._message(state, place, crossing, crossing.producer[0], True)
            return
        outlet = self._outlet(producer, crossing)
        if outlet.local_consumers is None:
            outlet.local_consumers = []
        outlet.local_consumers.append((place, state, crossing.place_out))
        if crossing.gradient:
            if state.local_producers is None:
                state.local_producers = []
            state.local_producers.append((place, outlet, crossing.place_out))

    def _message(self, state: UnitState, place: int, crossing: _Crossing, other: int, receives: bool) -> None:
        """Make this rank's end of a message with the rank of another chunk, and its end of the gradient's message."""
        producer, gradient, _, target, cut, stream, sibling = crossing
        peer = self.linker.layout.chunks[other].rank
        shape, dtype = self._declared(producer) if cut is None else cut
        chunk, microbatch, sub = producer
        number = chunk * self.num_microbatches + microbatch
        tag = 2 * ((number * self.max_parts + sub) * self.fan_out + sibling)
        forward, backward = (Verb.RECV_F, Verb.SEND_B) if receives else (Verb.SEND_F, Verb.RECV_B)
        outlet = state if receives else self._outlet(state, crossing)
        name = producer, target, stream
        self.messages[forward, *name] = MessageState(state, outlet, place, False, peer, tag, shape, dtype)
        if gradient:
            self.messages[backward, *name] = MessageState(state, outlet, place, True, peer, tag + 1, shape, dtype)

    def _message_of(self, action: Action, key: Key) -> MessageState:
        """Return the message of an action."""
        message = self.messages.get((action.verb.post, key, action.target, action.stream))
        if message is None:
            raise ExecutionError(f"'{action_text(action)}' is not a message of rank {self.linker.rank}")
        if action.shape is not None and (
            action.shape != message.shape or torch_dtype(action.dtype) != message.dtype or action.peer != message.peer
        ):
            raise ExecutionError(
                f"'{action_text(action)}': the model declares {message.shape} {message.dtype} with rank "
                f"{message.peer}; make a plan for this model and batch"
            )
        return message


_ANY_SHAPE = TensorShape(())
"""Placeholder shape of tensors that are never empty."""
