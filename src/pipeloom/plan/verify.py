"""Prove a plan complete, free of deadlock and made for this model and batch, or say where it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from pipeloom.errors import InputError, PlanError
from pipeloom.packing import Packing
from pipeloom.plan.action import ExecutionPlan, Verb, promised_verbs
from pipeloom.plan.dryrun import dry_run, grid, runs_to_end
from pipeloom.plan.flow import flow_of
from pipeloom.plan.messages import messages_of
from pipeloom.plan.routes import Unit, collective_order, make_routes
from pipeloom.plan.table import (
    IS_CHUNK,
    IS_COMPUTE,
    IS_UNIT,
    IS_WAIT,
    VERBS,
    BoolArray,
    IntArray,
    PlanTable,
    code,
    joint_numbers,
    numbered,
    table_of,
)
from pipeloom.plan.text import action_text
from pipeloom.spec import Layout, word_strategies


def verify(
    plan: ExecutionPlan, layout: Layout | None = None, packing: Packing | None = None, *, serial: bool = False
) -> tuple[str, ...]:
    """Check a plan; return when it is complete and cannot deadlock, neither under NCCL's rules nor gloo's.

    Always: each rank's steps are in a possible order (a backward after its forward, every receive and send
    posted once and waited for once), a unit recomputes, offloads and loads before its backward exactly what the
    strategy of its forward says, and a dry run ends with every message matched, with equal shapes, in an
    order that NCCL accepts (what NCCL accepts, gloo does too). A computation starts after what it takes from other
    chunks has arrived, and a message is sent after it was computed, as far as the names of chunks and messages tell.
    With a layout: every chunk is on its rank, its strategies are as many as its layers, and
    every unit of a trained module has its backward. With a packing too: every unit of the iteration is there,
    and every computation has what it needs before it starts, from exactly the ranks that have it. With ``serial``
    also where a rank's messages are served one after the other, whoever the peers are, joined or not.

    Parameters
    ----------
    packing : Packing or None
        Of the plan's iteration.

    Returns
    -------
    tuple of str
        What was not checked, as it takes a layout or a packing.

    Raises
    ------
    PlanError
        Naming rank, step and action, with the grid of ranks and steps around the place.
    """
    if len(plan.ranks) != plan.num_ranks:
        raise PlanError(f"the plan has {len(plan.ranks)} ranks, its header says {plan.num_ranks}")
    table = table_of(plan)
    posts = _check_steps(table)
    if not runs_to_end(table, posts, serial):
        _explain_stop(plan, serial)
    if layout is not None:
        _check_layout(table, layout)
    if layout is not None and packing is not None:
        _check_transfers(table, layout, packing)
        return ()
    moves, faults, unknown = flow_of(table, layout)
    for row, problem in faults[:1]:
        _fail_row(table, row, problem)
    _check_moves(table, np.array(moves, np.int64).reshape(-1, 5).T)
    missing = ["that all samples of the batch are there: it takes a packing"]
    if unknown:
        first = action_text(plan.ranks[int(table.rank[unknown[0]])][table.step(unknown[0])])
        missing.append(
            f"which parts of their microbatch {len(unknown)} forwards take, such as {first!r}: it takes a packing"
        )
    if layout is None:
        missing.append("chunks, layers, and what a rank keeps for itself between modules: it takes a layout")
    return tuple(missing)


class _Faults:
    """What is wrong, of which the first is told: the lowest rank's earliest, and of one action what was asked first."""

    def __init__(self, table: PlanTable) -> None:
        self.table = table
        self.found: list[tuple[int, int, int, str]] = []

    def at(self, rows: IntArray, bad: BoolArray, problem: str | Callable[[int], str]) -> None:
        """Note the first of some rows that are bad."""
        place = int(bad.argmax()) if len(bad) else 0
        if not len(bad) or not bad[place]:
            return
        row = int(rows[place])
        text = problem if isinstance(problem, str) else problem(row)
        self.found.append((int(self.table.rank[row]), self.table.step(row), len(self.found), text))

    def at_end(self, rank: int, problem: str) -> None:
        """Note what a rank's list ends without."""
        self.found.append((rank, len(self.table.plan.ranks[rank]), len(self.found), problem))

    def tell(self) -> None:
        """Refuse the plan where something was noted."""
        if self.found:
            rank, step, _, problem = min(self.found)
            _fail(self.table.plan, rank, step, problem)


def _check_steps(table: PlanTable) -> IntArray:
    """Check what every rank's list can show by itself; per entry of ``table.messages`` the row that posts that end."""
    faults = _Faults(table)
    stepped = _check_optimizer(table, faults)
    units = np.flatnonzero(IS_UNIT[table.verb])
    group = joint_numbers(table.rank[units], table.unit[units])
    verb = table.verb[units]
    late = IS_COMPUTE[verb] & (units > stepped[table.rank[units]])
    faults.at(units, late, "computes after the optimiser step")
    done = _Done(units, verb, group)
    _check_compute(faults, done)
    _check_memory(faults, done)
    posts = _check_messages(table, faults)
    faults.tell()
    return posts


def _check_optimizer(table: PlanTable, faults: _Faults) -> IntArray:
    """Check that no rank steps twice; the row of every rank's step, beyond all rows where there is none."""
    rows = np.flatnonzero(table.verb == code(Verb.OPTIMIZER_STEP))
    ranks = table.rank[rows]
    faults.at(rows[1:], ranks[1:] == ranks[:-1], "is a second optimiser step")
    stepped = np.full(table.plan.num_ranks, len(table.verb), np.int64)
    stepped[ranks[::-1]] = rows[::-1]
    return stepped


class _Done:
    """What is done with every unit of a rank, and where first."""

    def __init__(self, rows: IntArray, verb: IntArray, group: IntArray) -> None:
        self.rows, self.verb, self.group = rows, verb, group
        self.num_groups = int(group.max(initial=-1)) + 1
        self.never = int(rows.max(initial=0)) + 1
        self.first = {each: self._first(each) for each in VERBS if each.is_unit}

    def _first(self, verb: Verb) -> IntArray:
        mine = self.verb == code(verb)
        found = np.full(self.num_groups, self.never, np.int64)
        # Of several for one place the last is kept.
        found[self.group[mine][::-1]] = self.rows[mine][::-1]
        return found

    def before(self, verb: Verb) -> BoolArray:
        """Per row, whether its unit did this before."""
        return self.first[verb][self.group] < self.rows

    def ever(self, verb: Verb) -> BoolArray:
        """Per group, whether it does this."""
        return self.first[verb] < self.never

    def is_any(self, *verbs: Verb) -> BoolArray:
        """Per row, whether it is one of these."""
        return np.isin(self.verb, [code(verb) for verb in verbs])


def _check_compute(faults: _Faults, done: _Done) -> None:
    """Check computations against those of their units before them."""
    rows, before = done.rows, done.before
    twice = np.zeros(len(rows), np.bool_)
    for verb in done.first:
        twice |= done.is_any(verb) & before(verb)
    faults.at(rows, twice, "is done twice")
    faults.at(rows, ~done.is_any(Verb.F) & ~before(Verb.F), "comes before its F")
    faults.at(rows, done.is_any(Verb.W) & ~before(Verb.I), "comes before its I")
    faults.at(rows, done.is_any(Verb.LOAD) & ~before(Verb.OFFLOAD), "loads what was not offloaded")
    beside = (done.is_any(Verb.I) & before(Verb.B)) | (done.is_any(Verb.B) & before(Verb.I))
    faults.at(rows, beside, "is a backward beside another one")
    after = done.is_any(Verb.RECOMPUTE, Verb.OFFLOAD) & (before(Verb.B) | before(Verb.I))
    faults.at(rows, after, "comes after its backward")


def _check_memory(faults: _Faults, done: _Done) -> None:
    """Check recomputation, offload and load of units against the strategies of their forwards."""
    table, rows = faults.table, done.rows
    steps = (rows - table.start[table.rank[rows]]).tolist()
    ranks, plan = table.rank[rows].tolist(), table.plan.ranks
    forward = np.flatnonzero(done.is_any(Verb.F) & (done.first[Verb.F][done.group] == rows))
    words = [plan[ranks[i]][steps[i]].strategy for i in forward.tolist()]
    which, strategies = numbered(words)
    promised: dict[Verb, BoolArray] = {verb: np.zeros(done.num_groups, np.bool_) for verb in VERBS if verb.is_memory}
    for number, strategy in enumerate(strategies):
        mine = forward[which == number]
        try:
            for verb in promised_verbs(strategy):
                promised[verb][done.group[mine]] = True
        except InputError as error:
            faults.at(rows[mine], np.ones(len(mine), np.bool_), str(error))
    backward = done.is_any(Verb.B, Verb.I)
    lacking: dict[Verb, BoolArray] = {}
    for verb, of_group in promised.items():
        faults.at(rows, done.is_any(verb) & ~of_group[done.group], "is not what the strategy of its F says")
        lacking[verb] = backward & of_group[done.group] & ~done.before(verb)

    def without(row: int) -> str:
        place = int(np.searchsorted(rows, row))
        missing = " and ".join(sorted(verb for verb, lacks in lacking.items() if lacks[place]))
        return f"comes without {missing}, which the strategy of its F needs"

    faults.at(rows, np.logical_or.reduce(list(lacking.values())), without)


def _check_messages(table: PlanTable, faults: _Faults) -> IntArray:
    """Check that both ends of every message are posted once and waited for once; see `_check_steps`."""
    rows, plan = table.messages, table.plan
    waits = IS_WAIT[table.verb[rows]]
    _check_peers(faults, rows[~waits])
    by_end = np.argsort(table.end, kind="stable")
    ends = table.end[by_end]
    opens = np.ones(len(ends), np.bool_)
    opens[1:] = ends[1:] != ends[:-1]
    begin = np.maximum.accumulate(np.where(opens, np.arange(len(ends)), 0))
    # Where an end was posted twice, its first post; a wait before any post is told anyway.
    place, posts = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    place[by_end], posts[by_end] = np.arange(len(ends)) - begin, rows[by_end[begin]]
    faults.at(rows, ~waits & (place > 0), "is posted twice")
    faults.at(rows, waits & (place == 0), "waits for what was never posted")
    faults.at(rows, waits & (place > 1), "waits twice")
    alone = np.flatnonzero((np.bincount(ends, minlength=1)[table.end] == 1) & ~waits)
    # Of every rank the first, and only one rank's is told.
    for i in alone[:1].tolist():
        row = int(rows[i])
        rank = int(table.rank[row])
        action = plan.ranks[rank][table.step(row)]
        unit = f"{action.chunk} {action.microbatch}.{action.sub_microbatch}"
        faults.at_end(rank, f"the list ends without '{action.verb.wait} {unit}'")
    return posts


def _check_peers(faults: _Faults, rows: IntArray) -> None:
    """Check that posts say with whom, and what."""
    plan, ranks = faults.table.plan, faults.table.rank[rows].tolist()
    steps = (rows - faults.table.start[faults.table.rank[rows]]).tolist()
    num_ranks = plan.num_ranks
    for rank, step in zip(ranks, steps, strict=True):
        action = plan.ranks[rank][step]
        peer = action.peer
        if peer is None or action.shape is None or not action.dtype or peer == rank or not 0 <= peer < num_ranks:
            row = np.array([faults.table.start[rank] + step])
            if peer is None or action.shape is None or not action.dtype:
                faults.at(row, np.ones(1, np.bool_), "needs peer, shape and dtype")
            else:
                faults.at(row, np.ones(1, np.bool_), f"peer {peer} is not another rank of 0..{num_ranks - 1}")
            return


def _explain_stop(plan: ExecutionPlan, serial: bool) -> None:
    """Say where a plan stops, by running it on paper."""
    messages = messages_of(plan)
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


def _check_layout(table: PlanTable, layout: Layout) -> None:
    plan = table.plan
    if plan.num_ranks != layout.num_ranks:
        raise PlanError(f"the plan has {plan.num_ranks} ranks, the layout {layout.num_ranks}")
    if plan.layout != layout.digest:
        raise PlanError(f"the plan is for layout {plan.layout}, this one is {layout.digest}")
    faults = _Faults(table)
    rank_of = {name: chunk.rank for name, chunk in zip(layout.chunk_names, layout.chunks, strict=True)}
    home = np.array([rank_of.get(name, -1) for name in table.chunks], np.int64)[table.chunk]
    rows, of_model = np.arange(len(table.verb)), table.verb != code(Verb.OPTIMIZER_STEP)
    faults.at(rows, of_model & (home < 0), lambda row: f"chunk {table.chunks[table.chunk[row]]!r} is not in the layout")
    elsewhere = (IS_UNIT | IS_CHUNK)[table.verb] & (home != table.rank)
    faults.at(rows, elsewhere, lambda row: f"the chunk is on rank {home[row]}")
    for rank in set(range(plan.num_ranks)) - set(table.rank[~of_model].tolist()):
        faults.at_end(rank, f"the list ends without an optimiser step '{Verb.OPTIMIZER_STEP}'")
    faults.tell()
    collective = set(table.rank[IS_CHUNK[table.verb]].tolist())
    for rank in range(plan.num_ranks):
        order = collective_order(layout, rank)
        if order.unshard or order.reduce or rank in collective:
            _check_collectives(plan, layout, rank)
    _check_strategies(table, layout)
    _check_complete(table, layout)


def _check_strategies(table: PlanTable, layout: Layout) -> None:
    """Check that a forward names one strategy for all layers of its chunk, or one for each."""
    layers_of = {name: chunk.num_layers for name, chunk in zip(layout.chunk_names, layout.chunks, strict=True)}
    for row in np.flatnonzero(table.verb == code(Verb.F)).tolist():
        layers = layers_of[table.chunks[table.chunk[row]]]
        named = len(word_strategies(table.plan.ranks[table.rank[row]][table.step(row)].strategy))
        if named not in (1, layers):
            _fail_row(table, row, f"names {named} strategies, its chunk has {layers} layers")


def _check_complete(table: PlanTable, layout: Layout) -> None:
    """Check that what is trained has its backwards, and nothing else has."""
    trained_of = {
        name: layout.has_backward(chunk.module) for name, chunk in zip(layout.chunk_names, layout.chunks, strict=True)
    }
    units = np.flatnonzero(IS_UNIT[table.verb])
    done = _Done(units, table.verb[units], joint_numbers(table.unit[units]))
    start = np.minimum.reduce(list(done.first.values()))
    order = np.argsort(start)
    trained = np.array([trained_of.get(name, False) for name in table.chunks], np.bool_)[table.chunk[start]]
    whole = done.ever(Verb.B) | (done.ever(Verb.I) & done.ever(Verb.W))
    lacking = done.ever(Verb.F) & trained & ~whole
    more = ~trained & np.logical_or.reduce([done.ever(verb) for verb in done.first if verb is not Verb.F])
    faults = _Faults(table)
    faults.at(start[order], lacking[order], "has no complete backward: neither B, nor I and W")
    faults.at(start[order], more[order], "has a backward, but nothing in or before its module is trained")
    faults.tell()


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


def _check_transfers(table: PlanTable, layout: Layout, packing: Packing) -> None:
    names = layout.chunk_names
    number_of = {name: i for i, name in enumerate(names)}
    chunks = [number_of.get(name, -1) for name in table.chunks]
    forward = _rows_of(table, chunks, Verb.F)
    backward = _rows_of(table, chunks, Verb.B) | _rows_of(table, chunks, Verb.I)
    try:
        routes = make_routes(layout, packing, forward)
    except InputError as error:
        raise PlanError(f"the plan is incomplete: {error}") from error
    moves: list[tuple[int, int, int, int, int]] = []
    """Row that gives, row that takes, a row of the producer, number of the target, and whether it is a gradient."""
    for transfer in routes.transfers:
        producer, consumer = forward[transfer.producer], forward[transfer.consumer]
        target = table.targets.get((routes.target(transfer, names), transfer.stream), -1)
        moves.append((producer, consumer, producer, target, 0))
        if transfer.gradient:
            moves.append((backward[transfer.consumer], backward[transfer.producer], producer, target, 1))
    _check_moves(table, np.array(moves, np.int64).reshape(-1, 5).T)


def _rows_of(table: PlanTable, chunks: list[int], verb: Verb) -> dict[Unit, int]:
    """Rows by unit of all that a verb is done with."""
    found: dict[Unit, int] = {}
    rows = np.flatnonzero(table.verb == code(verb))
    steps = (rows - table.start[table.rank[rows]]).tolist()
    ranks = table.plan.ranks
    for row, rank, step, chunk in zip(
        rows.tolist(), table.rank[rows].tolist(), steps, table.chunk[rows].tolist(), strict=True
    ):
        action = ranks[rank][step]
        found[Unit(chunks[chunk], action.microbatch, action.sub_microbatch)] = row
    return found


def _check_moves(table: PlanTable, moves: IntArray) -> None:
    """Check that what one unit makes is with the other before it starts."""
    gives, takes, producer, target, back = moves
    apart = table.rank[gives] != table.rank[takes]
    message = np.where(apart, table.number_of(table.unit[producer], target, back), -1)
    faults: list[tuple[int, int, Callable[[int], NoReturn]]] = []

    def note(bad: BoolArray, tell: Callable[[int], NoReturn]) -> None:
        if len(bad) and bad.any():
            faults.append((int(bad.argmax()), len(faults), tell))

    def early(i: int) -> NoReturn:
        problem = f"starts before step {table.step(int(gives[i]))}, whose result it takes"
        _fail_row(table, int(takes[i]), problem)

    note(~apart & (gives > takes), early)
    at = {}
    for ends, here in (("send", gives), ("receive", takes), ("wait", takes)):
        at[ends] = np.full(len(gives), -1, np.int64)
        for direction, pair in enumerate(_ENDS[ends]):
            rows = _last_row(table, pair)
            mine = apart & (back == direction) & (message >= 0)
            at[ends][mine] = rows[message[mine]]
        missing = apart & ((at[ends] < 0) | (table.rank[at[ends]] != table.rank[here]))

        def absent(i: int, ends: str = ends, here: IntArray = here) -> NoReturn:
            verb, rank, row = _ENDS[ends][int(back[i])], int(table.rank[here[i]]), int(producer[i])
            unit = table.plan.ranks[table.rank[row]][table.step(row)]
            what = f"{verb} {unit.chunk} {unit.microbatch}.{unit.sub_microbatch}"
            _fail_row(table, int(here[i]), f"'{what}' is missing on rank {rank}")

        note(missing, absent)
    note(apart & (at["send"] < gives), lambda i: _fail_row(table, int(at["send"][i]), "sends before it is computed"))
    note(
        apart & (at["wait"] > takes),
        lambda i: _fail_row(table, int(takes[i]), "starts before what it takes has arrived"),
    )
    if faults:
        place, _, tell = min(faults, key=lambda fault: fault[:2])
        tell(place)
    used = np.zeros(len(table.names), np.bool_)
    used[message[apart]] = True
    for verb in VERBS:
        mine = table.verb[table.messages] == code(verb)
        rows, name = table.messages[mine], table.message[mine]
        again = np.ones(len(rows), np.bool_)
        again[np.unique(name, return_index=True)[1]] = False
        idle = rows[~used[name] | again]
        if len(idle):
            _fail_row(table, int(idle[0]), "is a message that nobody needs")


_ENDS = {"send": (Verb.SEND_F, Verb.SEND_B), "receive": (Verb.RECV_F, Verb.RECV_B), "wait": (Verb.WAIT_F, Verb.WAIT_B)}
"""What is done with a message, of an activation and of a gradient."""


def _last_row(table: PlanTable, verb: Verb) -> IntArray:
    """By message, the last row with a verb; -1: none."""
    mine = table.verb[table.messages] == code(verb)
    rows = np.full(len(table.names), -1, np.int64)
    rows[table.message[mine]] = table.messages[mine]
    return rows


def _fail_row(table: PlanTable, row: int, problem: str) -> NoReturn:
    _fail(table.plan, int(table.rank[row]), table.step(row), problem)


def _fail(plan: ExecutionPlan, rank: int, step: int, problem: str) -> NoReturn:
    actions = plan.ranks[rank]
    what = f"'{action_text(actions[step])}' " if step < len(actions) else ""
    steps = tuple(step if r == rank else min(step, len(plan.ranks[r])) for r in range(plan.num_ranks))
    raise PlanError(f"rank {rank}, step {step}: {what}{problem}\n{grid(plan, steps)}")
