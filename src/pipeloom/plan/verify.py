"""Prove a plan complete and free of deadlock, or say where it fails."""

from __future__ import annotations

from collections import defaultdict
from typing import NoReturn

from pipeloom.errors import InputError, PlanError
from pipeloom.packing import Packing
from pipeloom.plan.action import COMPUTE_VERBS, WAIT_VERBS, Action, ExecutionPlan
from pipeloom.plan.collectives import collective_order
from pipeloom.plan.dryrun import dry_run, grid
from pipeloom.plan.messages import Messages, messages_of
from pipeloom.plan.routes import Unit, make_routes
from pipeloom.plan.text import action_text
from pipeloom.spec import Layout

_LETTER = {"F": "F", "B": "B", "I": "I", "W": "W", "RC": "R", "OF": "O", "LD": "L"}
"""What is done with a unit, a letter each."""
_Key = tuple[str, int, int]
"""Chunk name, microbatch, sub-microbatch: a unit as plans name it."""


def verify(
    plan: ExecutionPlan,
    layout: Layout | None = None,
    packing: Packing | None = None,
    *,
    serial: bool = False,
) -> None:
    """Check a plan; return when it is complete and cannot deadlock, neither under NCCL's rules nor gloo's.

    Always: each rank's steps are in a possible order (a backward after its forward, every receive and send
    posted once and waited for once), and a dry run ends with every message matched, with equal shapes, in an
    order that NCCL accepts (what NCCL accepts, gloo does too). With a layout: every chunk is on its rank, and
    every unit of a trained module has its backward. With a packing too: every unit of the iteration is there,
    and every computation has what it needs before it starts, from exactly the ranks that have it. With ``serial``
    also where a rank's messages are served one after the other, whoever the peers are, joined or not.

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
            _check_hand_overs(plan, messages, layout, packing)


def _check_steps(plan: ExecutionPlan, messages: Messages, rank: int) -> None:
    """Check what one rank's list can show by itself."""
    done: defaultdict[_Key, str] = defaultdict(str)
    waited: dict[tuple[int, bool], bool] = {}
    """By message and whether it is sent here: whether its end was waited for."""
    stepped = False
    for step, (action, message) in enumerate(zip(plan.ranks[rank], messages.rows[rank], strict=True)):
        verb = action.verb
        if message is not None:
            if action.verb in WAIT_VERBS:
                key = (message, verb[0] == "D")
                if waited.get(key) is not False:
                    _fail(
                        plan,
                        rank,
                        step,
                        "waits twice" if key in waited else "waits for what was never posted",
                    )
                waited[key] = True
            else:
                _check_peer(plan, rank, step)
                key = (message, verb[0] == "S")
                if key in waited:
                    _fail(plan, rank, step, "is posted twice")
                waited[key] = False
        elif verb in _LETTER:
            if stepped and verb in COMPUTE_VERBS:
                _fail(plan, rank, step, "computes after the optimiser step")
            unit = _key(action)
            before = done[unit]
            if not (verb == "F" and not before):
                _check_compute(plan, rank, step, before)
            done[unit] = before + _LETTER[verb]
        elif verb == "OS":
            if stepped:
                _fail(plan, rank, step, "is a second optimiser step")
            stepped = True
    if not all(waited.values()):
        missing, sent = next(key for key, over in waited.items() if not over)
        name = messages.names()[missing]
        wait = f"{'D' if sent else 'W'}{name.direction} {name.chunk} {name.microbatch}.{name.sub_microbatch}"
        _fail(plan, rank, len(plan.ranks[rank]), f"the list ends without '{wait}'")


def _check_compute(plan: ExecutionPlan, rank: int, step: int, done: str) -> None:
    """Check one computation against those of its unit before it."""
    verb = plan.ranks[rank][step].verb
    if _LETTER[verb] in done:
        _fail(plan, rank, step, "is done twice")
    if verb != "F" and "F" not in done:
        _fail(plan, rank, step, "comes before its F")
    if verb == "W" and "I" not in done:
        _fail(plan, rank, step, "comes before its I")
    if verb == "LD" and "O" not in done:
        _fail(plan, rank, step, "loads what was not offloaded")
    if (verb == "I" and "B" in done) or (verb == "B" and "I" in done):
        _fail(plan, rank, step, "is a backward beside another one")
    if verb in ("RC", "OF") and ("B" in done or "I" in done):
        _fail(plan, rank, step, "comes after its backward")


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
    done: defaultdict[_Key, str] = defaultdict(str)
    place: dict[_Key, tuple[int, int]] = {}
    offloaded: set[_Key] = set()
    for rank, actions in enumerate(plan.ranks):
        if not any(action.verb == "OS" for action in actions):
            _fail(plan, rank, len(actions), "the list ends without an optimiser step 'OS'")
        for step, action in enumerate(actions):
            verb, chunk = action.verb, action.chunk
            if verb == "OS":
                continue
            if chunk not in rank_of:
                _fail(plan, rank, step, f"chunk {chunk!r} is not in the layout")
            letter = _LETTER.get(verb)
            if (letter or verb in ("UN", "RG")) and rank_of[chunk] != rank:
                _fail(plan, rank, step, f"the chunk is on rank {rank_of[chunk]}")
            if letter:
                key = _key(action)
                done[key] += letter
                if "offload" in action.strategy:
                    offloaded.add(key)
                place.setdefault(key, (rank, step))
    for rank in range(plan.num_ranks):
        _check_collectives(plan, layout, rank)
    trained_of = {
        name: layout.has_backward(chunk.module)
        for name, chunk in zip(layout.chunk_names, layout.chunks, strict=True)
    }
    for key, letters in done.items():
        rank, step = place[key]
        trained = trained_of[key[0]]
        if "F" in letters and trained and not ("B" in letters or ("I" in letters and "W" in letters)):
            _fail(plan, rank, step, "has no complete backward: neither B, nor I and W")
        if trained and key in offloaded and not ("O" in letters and "L" in letters):
            _fail(plan, rank, step, "offloads by its strategy, but has no OF or no LD")
        if not trained and letters.strip("F"):
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
        elif action.verb in COMPUTE_VERBS:
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
    forward: dict[Unit, tuple[int, int]] = {}
    backward: dict[Unit, tuple[int, int]] = {}
    """Where a unit takes and gives: rank and step of its F, and of its B or I."""
    at: dict[str, dict[int, tuple[int, int]]] = {verb: {} for verb in ("S", "R", "W")}
    for rank, (actions, row) in enumerate(zip(plan.ranks, messages.rows, strict=True)):
        for step, (action, message) in enumerate(zip(actions, row, strict=True)):
            verb = action.verb
            if message is not None:
                if verb[0] != "D":
                    at[verb[0]][message] = (rank, step)
            elif verb in ("F", "B", "I"):
                unit = Unit(number_of[action.chunk], action.microbatch, action.sub_microbatch)
                (forward if verb == "F" else backward)[unit] = (rank, step)
    try:
        routes = make_routes(layout, packing, forward)
    except InputError as error:
        raise PlanError(f"the plan is incomplete: {error}") from error
    checked = _HandOvers(plan, messages, names, at)
    for hand_over in routes.hand_overs:
        producer, consumer = hand_over.producer, hand_over.consumer
        target = routes.target(hand_over, names)
        checked.check("F", forward[producer], forward[consumer], producer, target)
        if hand_over.gradient:
            checked.check("B", backward[consumer], backward[producer], producer, target)
    if len(checked.used) < len(messages.number_of):
        for places in at.values():
            for message, (rank, step) in places.items():
                if message not in checked.used:
                    _fail(plan, rank, step, "is a message that nobody needs")


class _HandOvers:
    """Checks that what one unit makes is with the other before it starts."""

    def __init__(
        self,
        plan: ExecutionPlan,
        messages: Messages,
        names: tuple[str, ...],
        at: dict[str, dict[int, tuple[int, int]]],
    ) -> None:
        self.plan, self.number_of, self.names = plan, messages.number_of, names
        self.sends, self.receives, self.waits = at["S"], at["R"], at["W"]
        self.used: set[int] = set()

    def check(
        self, direction: str, giver: tuple[int, int], taker: tuple[int, int], producer: Unit, target: str
    ) -> None:
        """Check one hand-over from one rank and step to another."""
        (from_rank, from_step), (to_rank, to_step) = giver, taker
        if from_rank == to_rank:
            if from_step > to_step:
                _fail(self.plan, to_rank, to_step, f"starts before step {from_step}, whose result it takes")
            return
        name = (direction, self.names[producer.chunk], producer.microbatch, producer.sub_microbatch, target)
        message = self.number_of.get(name, -1)
        for verb, places, here, step in (
            ("S", self.sends, from_rank, from_step),
            ("R", self.receives, to_rank, to_step),
            ("W", self.waits, to_rank, to_step),
        ):
            if message not in places or places[message][0] != here:
                what = f"{verb}{direction} {name[1]} {name[2]}.{name[3]}"
                _fail(self.plan, here, step, f"'{what}' is missing on rank {here}")
        self.used.add(message)
        if self.sends[message][1] < from_step:
            _fail(self.plan, *self.sends[message], "sends before it is computed")
        if self.waits[message][1] > to_step:
            _fail(self.plan, to_rank, to_step, "starts before what it takes has arrived")


def _key(action: Action) -> _Key:
    return (action.chunk, action.microbatch, action.sub_microbatch)


def _fail(plan: ExecutionPlan, rank: int, step: int, problem: str) -> NoReturn:
    actions = plan.ranks[rank]
    what = f"'{action_text(actions[step])}' " if step < len(actions) else ""
    steps = tuple(step if r == rank else min(step, len(plan.ranks[r])) for r in range(plan.num_ranks))
    raise PlanError(f"rank {rank}, step {step}: {what}{problem}\n{grid(plan, steps)}")
