"""Prove a plan complete, free of deadlock and made for this model and batch, or say where it fails."""

from __future__ import annotations

from collections import defaultdict
from typing import NoReturn

from pipeloom.errors import InputError, PlanError
from pipeloom.packing import Packing
from pipeloom.plan.action import Action, ExecutionPlan, Verb, promised_verbs
from pipeloom.plan.dryrun import dry_run, grid
from pipeloom.plan.messages import Messages, messages_of
from pipeloom.plan.routes import (
    Router,
    Unit,
    boundary_shapes,
    collective_order,
    make_routes,
    target_word,
    transferred_workload,
)
from pipeloom.plan.text import action_text
from pipeloom.spec import Layout, ModelSpec

_Key = tuple[str, int, int]
"""Chunk name, microbatch, sub-microbatch: a unit as plans name it."""


def verify(
    plan: ExecutionPlan, layout: Layout | None = None, packing: Packing | None = None, *, serial: bool = False
) -> None:
    """Check a plan; return when it is complete and cannot deadlock, neither under NCCL's rules nor gloo's.

    Always: each rank's steps are in a possible order (a backward after its forward, every receive and send
    posted once and waited for once), a unit recomputes, offloads and loads before its backward exactly what the
    strategy of its forward says, and a dry run ends with every message matched, with equal shapes, in an
    order that NCCL accepts (what NCCL accepts, gloo does too). With a layout: every chunk is on its rank, and
    every unit of a trained module has its backward. With a packing too: every unit of the iteration is there,
    and every computation has what it needs before it starts, from exactly the ranks that have it. With ``serial``
    also where a rank's messages are served one after the other, whoever the peers are, joined or not.

    Parameters
    ----------
    plan : ExecutionPlan
    layout : Layout or None
    packing : Packing or None
        Of the plan's iteration.
    serial : bool

    Raises
    ------
    PlanError
        Naming rank, step and action, with the grid of ranks and steps around the place.
    """
    if len(plan.ranks) != plan.num_ranks:
        raise PlanError(f"the plan has {len(plan.ranks)} ranks, its header says {plan.num_ranks}")
    messages = messages_of(plan)
    for rank in range(plan.num_ranks):
        _check_steps(plan, messages, rank)
    _check_dry_run(plan, messages, serial)
    if layout is not None:
        _check_layout(plan, layout)
        if packing is not None:
            _check_transfers(plan, messages, layout, packing)


def _check_steps(plan: ExecutionPlan, messages: Messages, rank: int) -> None:
    """Check what one rank's list can show by itself."""
    done: defaultdict[_Key, set[Verb]] = defaultdict(set)
    promised: dict[_Key, frozenset[Verb]] = {}
    waited: dict[tuple[int, Verb], bool] = {}
    """By message and the verb that posts this end of it: whether the end was waited for."""
    stepped = False
    forward, optimizer_step = Verb.F, Verb.OPTIMIZER_STEP
    for step, (action, message) in enumerate(zip(plan.ranks[rank], messages.rows[rank], strict=True)):
        verb = action.verb
        if message is not None:
            key = (message, verb.post)
            if verb.is_wait:
                if waited.get(key) is not False:
                    _fail(plan, rank, step, "waits twice" if key in waited else "waits for what was never posted")
                waited[key] = True
            else:
                _check_peer(plan, rank, step)
                if key in waited:
                    _fail(plan, rank, step, "is posted twice")
                waited[key] = False
        elif verb.is_unit:
            if stepped and verb.is_compute:
                _fail(plan, rank, step, "computes after the optimiser step")
            unit = _key(action)
            before = done[unit]
            if before or verb is not forward:
                _check_compute(plan, rank, step, before)
                _check_memory(plan, rank, step, before, promised[unit])
            else:
                promised[unit] = _promised(plan, rank, step)
            before.add(verb)
        elif verb is optimizer_step:
            if stepped:
                _fail(plan, rank, step, "is a second optimiser step")
            stepped = True
    if not all(waited.values()):
        missing, post = next(key for key, over in waited.items() if not over)
        name = messages.names()[missing]
        wait = f"{post.wait} {name.chunk} {name.microbatch}.{name.sub_microbatch}"
        _fail(plan, rank, len(plan.ranks[rank]), f"the list ends without '{wait}'")


def _check_compute(plan: ExecutionPlan, rank: int, step: int, done: set[Verb]) -> None:
    """Check one computation against those of its unit before it."""
    verb = plan.ranks[rank][step].verb
    if verb in done:
        _fail(plan, rank, step, "is done twice")
    if verb is not Verb.F and Verb.F not in done:
        _fail(plan, rank, step, "comes before its F")
    if verb is Verb.W and Verb.I not in done:
        _fail(plan, rank, step, "comes before its I")
    if verb is Verb.LOAD and Verb.OFFLOAD not in done:
        _fail(plan, rank, step, "loads what was not offloaded")
    if (verb is Verb.I and Verb.B in done) or (verb is Verb.B and Verb.I in done):
        _fail(plan, rank, step, "is a backward beside another one")
    if verb in (Verb.RECOMPUTE, Verb.OFFLOAD) and (Verb.B in done or Verb.I in done):
        _fail(plan, rank, step, "comes after its backward")


def _promised(plan: ExecutionPlan, rank: int, step: int) -> frozenset[Verb]:
    """What the strategy of a forward demands before the backward."""
    try:
        return promised_verbs(plan.ranks[rank][step].strategy)
    except InputError as error:
        _fail(plan, rank, step, str(error))


def _check_memory(plan: ExecutionPlan, rank: int, step: int, done: set[Verb], promised: frozenset[Verb]) -> None:
    """Check recomputation, offload and load of a unit against the strategy of its forward."""
    verb = plan.ranks[rank][step].verb
    if verb.is_memory and verb not in promised:
        _fail(plan, rank, step, "is not what the strategy of its F says")
    if verb in (Verb.B, Verb.I) and not promised <= done:
        missing = " and ".join(sorted(promised - done))
        _fail(plan, rank, step, f"comes without {missing}, which the strategy of its F needs")


def _check_peer(plan: ExecutionPlan, rank: int, step: int) -> None:
    action = plan.ranks[rank][step]
    if action.peer is None or action.shape is None or not action.dtype:
        _fail(plan, rank, step, "needs peer, shape and dtype")
    if action.peer == rank or not 0 <= action.peer < plan.num_ranks:
        _fail(plan, rank, step, f"peer {action.peer} is not another rank of 0..{plan.num_ranks - 1}")


def _check_dry_run(plan: ExecutionPlan, messages: Messages, serial: bool) -> None:
    stop = dry_run(plan, "nccl", messages)
    if stop is None and serial:
        stop = dry_run(plan, "nccl serial", messages)
        if stop is not None:
            raise PlanError(
                f"the plan stops where a rank's messages are served one after the other: {stop.reason}; lower it "
                f"with serial=True\n{grid(plan, stop.steps)}"
            )
    if stop is None:
        return
    lenient = dry_run(plan, "gloo", messages) is None
    rules = "under NCCL's rules (gloo's tags would allow it)" if lenient else "under NCCL's and gloo's rules"
    raise PlanError(f"the plan stops {rules}: {stop.reason}\n{grid(plan, stop.steps)}")


def _check_layout(plan: ExecutionPlan, layout: Layout) -> None:
    if plan.num_ranks != layout.num_ranks:
        raise PlanError(f"the plan has {plan.num_ranks} ranks, the layout {layout.num_ranks}")
    if plan.layout != layout.digest:
        raise PlanError(f"the plan is for layout {plan.layout}, this one is {layout.digest}")
    rank_of = {name: chunk.rank for name, chunk in zip(layout.chunk_names, layout.chunks, strict=True)}
    done: defaultdict[_Key, set[Verb]] = defaultdict(set)
    place: dict[_Key, tuple[int, int]] = {}
    optimizer_step = Verb.OPTIMIZER_STEP
    for rank, actions in enumerate(plan.ranks):
        stepped = False
        for step, action in enumerate(actions):
            verb, chunk = action.verb, action.chunk
            if verb is optimizer_step:
                stepped = True
                continue
            if chunk not in rank_of:
                _fail(plan, rank, step, f"chunk {chunk!r} is not in the layout")
            if verb.is_message:
                continue
            if (verb.is_unit or verb.is_chunk) and rank_of[chunk] != rank:
                _fail(plan, rank, step, f"the chunk is on rank {rank_of[chunk]}")
            if verb.is_unit:
                key = _key(action)
                done[key].add(verb)
                place.setdefault(key, (rank, step))
        if not stepped:
            _fail(plan, rank, len(actions), f"the list ends without an optimiser step '{optimizer_step}'")
    for rank in range(plan.num_ranks):
        _check_collectives(plan, layout, rank)
    trained_of = {
        name: layout.has_backward(chunk.module) for name, chunk in zip(layout.chunk_names, layout.chunks, strict=True)
    }
    for key, verbs in done.items():
        rank, step = place[key]
        trained = trained_of[key[0]]
        if Verb.F in verbs and trained and not (Verb.B in verbs or {Verb.I, Verb.W} <= verbs):
            _fail(plan, rank, step, "has no complete backward: neither B, nor I and W")
        if not trained and verbs - {Verb.F}:
            _fail(plan, rank, step, "has a backward, but nothing in or before its module is trained")


def _check_collectives(plan: ExecutionPlan, layout: Layout, rank: int) -> None:
    """Check that parameters are whole before they are used, and gradients when they are reduced, in the one order."""
    names, order = layout.chunk_names, collective_order(layout, rank)
    expected = {
        Verb.UNSHARD: [names[chunk] for chunk in order.unshard],
        Verb.REDUCE_GRAD: [names[chunk] for chunk in order.reduce],
    }
    reduced: set[str] = set()
    stepped = False
    for step, action in enumerate(plan.ranks[rank]):
        if action.verb in expected:
            following = expected[action.verb]
            if not following or following[0] != action.chunk:
                _fail(plan, rank, step, f"is out of turn, next is {following[0] if following else 'none'}")
            if stepped:
                _fail(plan, rank, step, "comes after the optimiser step")
            del following[0]
            if action.verb is Verb.REDUCE_GRAD:
                reduced.add(action.chunk)
        elif action.verb is Verb.OPTIMIZER_STEP:
            stepped = True
        elif action.verb.is_compute:
            if action.chunk in expected[Verb.UNSHARD]:
                _fail(plan, rank, step, "is computed before its parameters are gathered by UNSHARD")
            if action.chunk in reduced:
                _fail(plan, rank, step, "is computed after its gradients were reduced by REDUCE_GRAD")
    for verb, missing in expected.items():
        if missing:
            _fail(plan, rank, len(plan.ranks[rank]), f"the list ends without '{verb} {missing[0]}'")


def _check_transfers(plan: ExecutionPlan, messages: Messages, layout: Layout, packing: Packing) -> None:
    names = layout.chunk_names
    number_of = {name: i for i, name in enumerate(names)}
    forward: dict[Unit, tuple[int, int]] = {}
    backward: dict[Unit, tuple[int, int]] = {}
    """Where a unit takes and gives: rank and step of its F, and of its B or I."""
    at: dict[Verb, dict[int, tuple[int, int]]] = {verb: {} for verb in Verb if verb.is_message}
    forward_verb, backward_verbs = Verb.F, (Verb.B, Verb.I)
    for rank, (actions, row) in enumerate(zip(plan.ranks, messages.rows, strict=True)):
        for step, (action, message) in enumerate(zip(actions, row, strict=True)):
            verb = action.verb
            if message is not None:
                at[verb][message] = (rank, step)
            elif verb is forward_verb or verb in backward_verbs:
                unit = Unit(number_of[action.chunk], action.microbatch, action.sub_microbatch)
                (forward if verb is forward_verb else backward)[unit] = (rank, step)
    try:
        routes = make_routes(layout, packing, forward)
    except InputError as error:
        raise PlanError(f"the plan is incomplete: {error}") from error
    checked = _Transfers(plan, messages, names, at)
    for transfer in routes.transfers:
        producer, consumer = transfer.producer, transfer.consumer
        target = routes.target(transfer, names)
        checked.check(Verb.SEND_F, forward[producer], forward[consumer], producer, target)
        if transfer.gradient:
            checked.check(Verb.SEND_B, backward[consumer], backward[producer], producer, target)
    if len(checked.used) < len(messages.number_of):
        for places in at.values():
            for message, (rank, step) in places.items():
                if message not in checked.used:
                    _fail(plan, rank, step, "is a message that nobody needs")


class _Transfers:
    """Checks that what one unit makes is with the other before it starts."""

    def __init__(
        self,
        plan: ExecutionPlan,
        messages: Messages,
        names: tuple[str, ...],
        at: dict[Verb, dict[int, tuple[int, int]]],
    ) -> None:
        self.plan, self.number_of, self.names, self.at = plan, messages.number_of, names, at
        self.used: set[int] = set()

    def check(self, send: Verb, giver: tuple[int, int], taker: tuple[int, int], producer: Unit, target: str) -> None:
        """Check one boundary transfer from one rank and step to another."""
        (from_rank, from_step), (to_rank, to_step) = giver, taker
        if from_rank == to_rank:
            if from_step > to_step:
                _fail(self.plan, to_rank, to_step, f"starts before step {from_step}, whose result it takes")
            return
        name = (send.direction, self.names[producer.chunk], producer.microbatch, producer.sub_microbatch, target)
        message = self.number_of.get(name, -1)
        receive, wait = send.other_end, send.other_end.wait
        for verb, here, step in ((send, from_rank, from_step), (receive, to_rank, to_step), (wait, to_rank, to_step)):
            places = self.at[verb]
            if message not in places or places[message][0] != here:
                what = f"{verb} {name[1]} {name[2]}.{name[3]}"
                _fail(self.plan, here, step, f"'{what}' is missing on rank {here}")
        self.used.add(message)
        if self.at[send][message][1] < from_step:
            _fail(self.plan, *self.at[send][message], "sends before it is computed")
        if self.at[wait][message][1] > to_step:
            _fail(self.plan, to_rank, to_step, "starts before what it takes has arrived")


def _key(action: Action) -> _Key:
    return (action.chunk, action.microbatch, action.sub_microbatch)


def _fail(plan: ExecutionPlan, rank: int, step: int, problem: str) -> NoReturn:
    actions = plan.ranks[rank]
    what = f"'{action_text(actions[step])}' " if step < len(actions) else ""
    steps = tuple(step if r == rank else min(step, len(plan.ranks[r])) for r in range(plan.num_ranks))
    raise PlanError(f"rank {rank}, step {step}: {what}{problem}\n{grid(plan, steps)}")


def check_shapes(plan: ExecutionPlan, model: ModelSpec, layout: Layout, packing: Packing) -> None:
    """Refuse a verified plan whose messages have other shapes than the model states for the batch at hand.

    A plan that is complete and free of deadlock in itself may still be one for another model or batch.

    Raises
    ------
    PlanError
        Naming the first message that differs, and the shape that it should have.
    """
    shapes = boundary_shapes(model, layout)
    names = layout.chunk_names
    chunks = {name: number for number, name in enumerate(names)}
    everything = [action for actions in plan.ranks for action in actions]
    units = [Unit(chunks[a.chunk], a.microbatch, a.sub_microbatch) for a in everything if a.verb == "F"]
    routes = Router(layout).of(packing, units)
    # A decoder in smaller parts takes some rows of an output, so messages of one unit may differ.
    known: dict[Unit, dict[str, tuple[tuple[int, ...], str]]] = {}
    for action in everything:
        if action.shape is None:
            continue
        unit = Unit(chunks[action.chunk], action.microbatch, action.sub_microbatch)
        if unit not in known:
            siblings = routes.out_of(unit)
            known[unit] = {
                target_word(h, siblings, names): shapes(unit.chunk, transferred_workload(h, layout, packing))
                for h in siblings
            }
        expected = known[unit].get(action.target)
        if (action.shape, action.dtype) != expected:
            should = "goes nowhere" if expected is None else f"has another shape than {expected[0]} {expected[1]}"
            raise PlanError(f"'{action_text(action)}' {should}")
