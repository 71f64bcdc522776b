"""Prove a plan complete and free of deadlock, or say where it fails."""

from __future__ import annotations

from collections import defaultdict
from typing import NoReturn

from pipeloom.errors import InputError, PlanError
from pipeloom.packing import Packing
from pipeloom.plan.action import Action, ExecutionPlan
from pipeloom.plan.collectives import collective_order
from pipeloom.plan.dryrun import Message, Messages, dry_run, grid, messages_of
from pipeloom.plan.routes import HandOver, Routes, Unit, make_routes
from pipeloom.plan.text import action_text
from pipeloom.spec import Layout

_WAIT_OF = {"RF": "WF", "RB": "WB", "SF": "DF", "SB": "DB"}
_Key = tuple[str, int, int]
"""Chunk name, microbatch, sub-microbatch: a unit as plans name it."""


def verify(
    plan: ExecutionPlan,
    layout: Layout | None = None,
    packing: Packing | None = None,
    *,
    batched: bool = False,
) -> None:
    """Check a plan; return when it is complete and cannot deadlock, neither under NCCL's rules nor gloo's.

    Always: each rank's steps are in a possible order (a backward after its forward, every receive and send
    posted once and waited for once), and a dry run ends with every message matched, with equal shapes, in an
    order that NCCL accepts (what NCCL accepts, gloo does too). With a layout: every chunk is on its rank, and
    every unit of a trained module has its backward. With a packing too: every unit of the iteration is there,
    and every computation has what it needs before it starts, from exactly the ranks that have it. With ``batched``
    also for a transport that joins neighbouring messages.

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
    _check_dry_run(plan, messages, batched)
    if layout is not None:
        _check_layout(plan, layout)
        if packing is not None:
            _check_hand_overs(plan, messages, layout, packing)


def _check_steps(plan: ExecutionPlan, messages: Messages, rank: int) -> None:
    """Check what one rank's list can show by itself."""
    done: set[tuple[str, _Key]] = set()
    posted: dict[tuple[str, Message], bool] = {}
    stepped = False
    for step, (action, message) in enumerate(zip(plan.ranks[rank], messages[rank], strict=True)):
        verb = action.verb
        if stepped and verb in ("F", "B", "I", "W"):
            _fail(plan, rank, step, "computes after the optimiser step")
        if verb == "OS":
            if stepped:
                _fail(plan, rank, step, "is a second optimiser step")
            stepped = True
        elif verb in ("F", "B", "I", "W", "RC", "OF", "LD"):
            _check_compute(plan, rank, step, done)
            done.add((verb, _key(action)))
        elif message is None:
            continue
        elif verb in _WAIT_OF:
            _check_peer(plan, rank, step)
            wait = (_WAIT_OF[verb], message)
            if wait in posted:
                _fail(plan, rank, step, "is posted twice")
            posted[wait] = False
        else:
            wait = (verb, message)
            if posted.get(wait) is not False:
                _fail(
                    plan, rank, step, "waits twice" if wait in posted else "waits for what was never posted"
                )
            posted[wait] = True
    for (expected, missing), waited in posted.items():
        if not waited:
            name = f"{missing.chunk} {missing.microbatch}.{missing.sub_microbatch}"
            _fail(plan, rank, len(plan.ranks[rank]), f"the list ends without '{expected} {name}'")


def _check_compute(plan: ExecutionPlan, rank: int, step: int, done: set[tuple[str, _Key]]) -> None:
    action = plan.ranks[rank][step]
    key = _key(action)
    if (action.verb, key) in done:
        _fail(plan, rank, step, "is done twice")
    if action.verb != "F" and ("F", key) not in done:
        _fail(plan, rank, step, "comes before its F")
    if action.verb == "W" and ("I", key) not in done:
        _fail(plan, rank, step, "comes before its I")
    if action.verb == "LD" and ("OF", key) not in done:
        _fail(plan, rank, step, "loads what was not offloaded")
    if (action.verb == "I" and ("B", key) in done) or (action.verb == "B" and ("I", key) in done):
        _fail(plan, rank, step, "is a backward beside another one")
    if action.verb in ("RC", "OF") and (("B", key) in done or ("I", key) in done):
        _fail(plan, rank, step, "comes after its backward")


def _check_peer(plan: ExecutionPlan, rank: int, step: int) -> None:
    action = plan.ranks[rank][step]
    if action.peer is None or action.shape is None or not action.dtype:
        _fail(plan, rank, step, "needs peer, shape and dtype")
    if action.peer == rank or not 0 <= action.peer < plan.num_ranks:
        _fail(plan, rank, step, f"peer {action.peer} is not another rank of 0..{plan.num_ranks - 1}")


def _check_dry_run(plan: ExecutionPlan, messages: Messages, batched: bool) -> None:
    stop = dry_run(plan, "nccl", messages)
    if stop is None and batched:
        stop = dry_run(plan, "nccl batched", messages)
        if stop is not None:
            raise PlanError(
                f"the plan stops where neighbouring messages are joined: {stop.reason}; lower it with "
                f"batched=True\n{grid(plan, stop.steps)}"
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
    chunk_of = {name: layout.chunks[i] for i, name in enumerate(layout.chunk_names)}
    verbs: defaultdict[_Key, set[str]] = defaultdict(set)
    place: dict[_Key, tuple[int, int]] = {}
    offloaded: set[_Key] = set()
    for rank, actions in enumerate(plan.ranks):
        if not any(action.verb == "OS" for action in actions):
            _fail(plan, rank, len(actions), "the list ends without an optimiser step 'OS'")
        for step, action in enumerate(actions):
            if action.verb == "OS":
                continue
            if action.chunk not in chunk_of:
                _fail(plan, rank, step, f"chunk {action.chunk!r} is not in the layout")
            if action.verb in ("F", "B", "I", "W", "RC", "OF", "LD", "UN", "RG"):
                if chunk_of[action.chunk].rank != rank:
                    _fail(plan, rank, step, f"the chunk is on rank {chunk_of[action.chunk].rank}")
                if action.verb in ("UN", "RG"):
                    continue
                verbs[_key(action)].add(action.verb)
                if "offload" in action.strategy:
                    offloaded.add(_key(action))
                place.setdefault(_key(action), (rank, step))
    for rank in range(plan.num_ranks):
        _check_collectives(plan, layout, rank)
    for key, present in verbs.items():
        rank, step = place[key]
        trained = layout.has_backward(chunk_of[key[0]].module)
        if "F" in present and trained and not ("B" in present or {"I", "W"} <= present):
            _fail(plan, rank, step, "has no complete backward: neither B, nor I and W")
        if trained and key in offloaded and not {"OF", "LD"} <= present:
            _fail(plan, rank, step, "offloads by its strategy, but has no OF or no LD")
        if not trained and present & {"B", "I", "W", "RC", "OF", "LD"}:
            _fail(plan, rank, step, "has a backward, but nothing in or before its module is trained")


def _check_collectives(plan: ExecutionPlan, layout: Layout, rank: int) -> None:
    """Check that parameters are whole before they are used, and gradients when they are reduced, in the one order."""
    names, order = layout.chunk_names, collective_order(layout, rank)
    expected = {
        "UN": [names[chunk] for chunk in order.unshard],
        "RG": [names[chunk] for chunk in order.reduce],
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
            if action.verb == "RG":
                reduced.add(action.chunk)
        elif action.verb == "OS":
            stepped = True
        elif action.verb in ("F", "B", "I", "W"):
            if action.chunk in expected["UN"]:
                _fail(plan, rank, step, "is computed before its parameters are gathered by UN")
            if action.chunk in reduced:
                _fail(plan, rank, step, "is computed after its gradients were reduced by RG")
    for verb, missing in expected.items():
        if missing:
            _fail(plan, rank, len(plan.ranks[rank]), f"the list ends without '{verb} {missing[0]}'")


def _check_hand_overs(plan: ExecutionPlan, messages: Messages, layout: Layout, packing: Packing) -> None:
    names = layout.chunk_names
    number_of = {name: i for i, name in enumerate(names)}
    where: dict[tuple[str, Unit], tuple[int, int]] = {}
    message_at: dict[tuple[str, Message], tuple[int, int]] = {}
    for rank, actions in enumerate(plan.ranks):
        for step, (action, message) in enumerate(zip(actions, messages[rank], strict=True)):
            if message is not None:
                if action.verb[0] != "D":
                    message_at[action.verb, message] = (rank, step)
            elif action.verb in ("F", "B", "I", "W"):
                unit = Unit(number_of[action.chunk], action.microbatch, action.sub_microbatch)
                where[action.verb, unit] = (rank, step)
    try:
        routes = make_routes(layout, packing, [unit for verb, unit in where if verb == "F"])
    except InputError as error:
        raise PlanError(f"the plan is incomplete: {error}") from error
    used: set[tuple[str, Message]] = set()
    for hand_over in routes.hand_overs:
        _check_hand_over(plan, names, routes, hand_over, False, where, message_at, used)
        if hand_over.gradient:
            _check_hand_over(plan, names, routes, hand_over, True, where, message_at, used)
    for key, (rank, step) in message_at.items():
        if key not in used:
            _fail(plan, rank, step, "is a message that nobody needs")


def _check_hand_over(
    plan: ExecutionPlan,
    names: tuple[str, ...],
    routes: Routes,
    hand_over: HandOver,
    gradient: bool,
    where: dict[tuple[str, Unit], tuple[int, int]],
    message_at: dict[tuple[str, Message], tuple[int, int]],
    used: set[tuple[str, Message]],
) -> None:
    """Check that what one unit makes is with the other before it starts."""
    producer, consumer = hand_over.producer, hand_over.consumer
    giver, taker = (consumer, producer) if gradient else (producer, consumer)
    from_rank, from_step = _place(where, giver, gradient)
    to_rank, to_step = _place(where, taker, gradient)
    if from_rank == to_rank:
        if from_step > to_step:
            _fail(plan, to_rank, to_step, f"starts before step {from_step}, whose result it takes")
        return
    direction = "B" if gradient else "F"
    target = routes.target(hand_over, names)
    message = Message(direction, names[producer.chunk], producer.microbatch, producer.sub_microbatch, target)
    for verb, rank in (("S", from_rank), ("R", to_rank), ("W", to_rank)):
        place = message_at.get((verb + direction, message))
        if place is None or place[0] != rank:
            here, step = (from_rank, from_step) if verb == "S" else (to_rank, to_step)
            name = f"{message.chunk} {message.microbatch}.{message.sub_microbatch}"
            _fail(plan, here, step, f"'{verb}{direction} {name}' is missing on rank {rank}")
        used.add((verb + direction, message))
    send = message_at["S" + direction, message]
    if send[1] < from_step:
        _fail(plan, *send, "sends before it is computed")
    wait = message_at["W" + direction, message]
    if wait[1] > to_step:
        _fail(plan, to_rank, to_step, "starts before what it takes has arrived")


def _place(where: dict[tuple[str, Unit], tuple[int, int]], unit: Unit, backward: bool) -> tuple[int, int]:
    if not backward:
        return where["F", unit]
    return where["B", unit] if ("B", unit) in where else where["I", unit]


def _key(action: Action) -> _Key:
    return (action.chunk, action.microbatch, action.sub_microbatch)


def _fail(plan: ExecutionPlan, rank: int, step: int, problem: str) -> NoReturn:
    actions = plan.ranks[rank]
    what = f"'{action_text(actions[step])}' " if step < len(actions) else ""
    steps = tuple(step if r == rank else min(step, len(plan.ranks[r])) for r in range(plan.num_ranks))
    raise PlanError(f"rank {rank}, step {step}: {what}{problem}\n{grid(plan, steps)}")
