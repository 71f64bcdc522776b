"""Verification: a plan is complete, free of deadlock and made for this model and batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from pipeloom.errors import InputError, PlanError
from pipeloom.packing import Packing
from pipeloom.plan.action import ExecutionPlan, Verb, promised_verbs
from pipeloom.plan.dryrun import dry_run, grid
from pipeloom.plan.flow import flow_of
from pipeloom.plan.routes import CollectiveOrder, Unit, collective_order, make_routes
from pipeloom.plan.table import (
    IS_CHUNK,
    IS_COMPUTE,
    IS_UNIT,
    IS_WAIT,
    VERBS,
    PlanTable,
    code,
    joint_numbers,
    numbered,
    table_of,
)
from pipeloom.plan.text import action_text
from pipeloom.spec import Layout, word_strategies
from pipeloom.taskgraph import BoolArray, IntArray


def verify(
    plan: ExecutionPlan,
    layout: Layout | None = None,
    packing: Packing | None = None,
    *,
    single_communicator: bool = False,
    serial: bool = False,
) -> tuple[str, ...]:
    """Verify that a plan is complete and cannot deadlock, neither under the rules of NCCL nor under those of gloo.

    These conditions are checked for every plan:

    - The steps of each rank have a valid order: each backward is after its forward, and every send and receive is
      posted once and waited for once.
    - Before its backward, a unit recomputes, offloads and loads exactly as the strategy of its forward requires.
    - A dry run ends. In it, every message is matched with an equal shape, in an order that NCCL accepts. Gloo then
      accepts it too.
    - A computation starts after its inputs have arrived, and a message is sent after it was computed, as far as the
      names of chunks and messages show this.

    With a layout, every chunk must be on its rank, the number of its strategies must match that of its layers, and
    every unit of a trained module must have its backward. With a packing as well, every unit of the iteration must be
    present and receive its inputs before it starts, from exactly the ranks that have them.

    Parameters
    ----------
    plan : ExecutionPlan
        Actions of every rank.
    layout : Layout or None
        Layout that the plan was made for.
    packing : Packing or None
        Packing of the plan's iteration.
    single_communicator : bool
        Also verify the plan for a single communicator, which serves the messages of a rank one by one for all peers.
    serial : bool
        Deprecated name of ``single_communicator``.

    Returns
    -------
    tuple of str
        Checks that were skipped without a layout or a packing.

    Raises
    ------
    PlanError
        A check fails. The message names rank, step and action, and shows the surrounding steps of all ranks.
    """
    if len(plan.ranks) != plan.num_ranks:
        raise PlanError(f"the plan has {len(plan.ranks)} ranks, its header says {plan.num_ranks}")
    table = table_of(plan)
    _check_steps(table)
    _check_end(table, single_communicator or serial)
    if layout is not None:
        _check_layout(table, layout)
    if layout is not None and packing is not None:
        _check_transfers(table, layout, packing)
        return ()
    moves, faults, unknown = flow_of(table, layout)
    for row, problem in faults[:1]:
        _fail_row(table, row, problem)
    _check_moves(table, np.array(moves, np.int64).reshape(-1, 5).T)
    missing = ["that all samples of the batch are present (needs a packing)"]
    if unknown:
        first = action_text(plan.ranks[int(table.rank[unknown[0]])][table.step(unknown[0])])
        missing.append(
            f"which parts of their microbatch {len(unknown)} forwards take, such as {first!r} (needs a packing)"
        )
    if layout is None:
        missing.append("chunks, layers, and transfers between modules on one rank (needs a layout)")
    return tuple(missing)


class _Faults:
    """Problems found so far. The first one by rank, then step, then order of the checks is reported."""

    def __init__(self, table: PlanTable) -> None:
        self.table = table
        self.found: list[tuple[int, int, int, str]] = []

    def at(self, rows: IntArray, bad: BoolArray, problem: str | Callable[[int], str]) -> None:
        """Add a problem of the first bad row."""
        place = int(bad.argmax()) if len(bad) else 0
        if not len(bad) or not bad[place]:
            return
        row = int(rows[place])
        text = problem if isinstance(problem, str) else problem(row)
        self.found.append((int(self.table.rank[row]), self.table.step(row), len(self.found), text))

    def at_end(self, rank: int, problem: str) -> None:
        """Add a problem at the end of a rank's list."""
        self.found.append((rank, len(self.table.plan.ranks[rank]), len(self.found), problem))

    def raise_first(self) -> None:
        """Raise the first problem, if any."""
        if self.found:
            rank, step, _, problem = min(self.found)
            _fail(self.table.plan, rank, step, problem)


def _check_steps(table: PlanTable) -> None:
    """Check the list of each rank by itself."""
    faults = _Faults(table)
    stepped = _check_optimizer(table, faults)
    units = np.flatnonzero(IS_UNIT[table.verb])
    group = joint_numbers(table.rank[units], table.unit[units])
    verb = table.verb[units]
    late = IS_COMPUTE[verb] & (units > stepped[table.rank[units]])
    faults.at(units, late, "computes after the optimizer step")
    done = _UnitSteps(units, verb, group)
    _check_compute(faults, done)
    _check_memory(faults, done)
    _check_messages(table, faults)
    faults.raise_first()


def _check_optimizer(table: PlanTable, faults: _Faults) -> IntArray:
    """Check that no rank has two optimizer steps; return the row of each step, or the number of rows if none."""
    rows = np.flatnonzero(table.verb == code(Verb.OPTIMIZER_STEP))
    ranks = table.rank[rows]
    faults.at(rows[1:], ranks[1:] == ranks[:-1], "is a second optimizer step")
    stepped = np.full(table.plan.num_ranks, len(table.verb), np.int64)
    stepped[ranks[::-1]] = rows[::-1]
    return stepped


class _UnitSteps:
    """First row of each verb, by unit and rank."""

    def __init__(self, rows: IntArray, verb: IntArray, group: IntArray) -> None:
        self.rows, self.verb, self.group = rows, verb, group
        self.num_groups = int(group.max(initial=-1)) + 1
        self.never = int(rows.max(initial=0)) + 1
        self.first = {each: self._first(each) for each in VERBS if each.is_unit}

    def _first(self, verb: Verb) -> IntArray:
        mine = self.verb == code(verb)
        found = np.full(self.num_groups, self.never, np.int64)
        # Reversed, since the last of several writes remains.
        found[self.group[mine][::-1]] = self.rows[mine][::-1]
        return found

    def before(self, verb: Verb) -> BoolArray:
        """Return for each row whether its unit has the verb in an earlier row."""
        return self.first[verb][self.group] < self.rows

    def ever(self, verb: Verb) -> BoolArray:
        """Return for each group whether it has the verb."""
        return self.first[verb] < self.never

    def is_any(self, *verbs: Verb) -> BoolArray:
        """Return for each row whether it has one of the verbs."""
        return np.isin(self.verb, [code(verb) for verb in verbs])


def _check_compute(faults: _Faults, done: _UnitSteps) -> None:
    """Check the order of the actions of each unit."""
    rows, before = done.rows, done.before
    twice = np.zeros(len(rows), np.bool_)
    for verb in done.first:
        twice |= done.is_any(verb) & before(verb)
    faults.at(rows, twice, "is done twice")
    faults.at(rows, ~done.is_any(Verb.F) & ~before(Verb.F), "comes before its F")
    faults.at(rows, done.is_any(Verb.W) & ~before(Verb.I), "comes before its I")
    faults.at(rows, done.is_any(Verb.LOAD) & ~before(Verb.OFFLOAD), "loads a unit that was not offloaded")
    second_backward = (done.is_any(Verb.I) & before(Verb.B)) | (done.is_any(Verb.B) & before(Verb.I))
    faults.at(rows, second_backward, "is a second backward of the unit (B and I exclude each other)")
    after = done.is_any(Verb.RECOMPUTE, Verb.OFFLOAD) & (before(Verb.B) | before(Verb.I))
    faults.at(rows, after, "comes after its backward")


def _check_memory(faults: _Faults, done: _UnitSteps) -> None:
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
        faults.at(rows, done.is_any(verb) & ~of_group[done.group], "is not in the strategy of its F")
        lacking[verb] = backward & of_group[done.group] & ~done.before(verb)

    def without(row: int) -> str:
        place = int(np.searchsorted(rows, row))
        missing = " and ".join(sorted(verb for verb, lacks in lacking.items() if lacks[place]))
        return f"comes without {missing}, which the strategy of its F needs"

    faults.at(rows, np.logical_or.reduce(list(lacking.values())), without)


def _check_messages(table: PlanTable, faults: _Faults) -> None:
    """Check that each end of a message is posted once and waited for once."""
    rows, plan = table.messages, table.plan
    waits = IS_WAIT[table.verb[rows]]
    _check_peers(faults, rows[~waits])
    by_end = np.argsort(table.end, kind="stable")
    ends = table.end[by_end]
    opens = np.ones(len(ends), np.bool_)
    opens[1:] = ends[1:] != ends[:-1]
    begin = np.maximum.accumulate(np.where(opens, np.arange(len(ends)), 0))
    place = np.empty(len(rows), np.int64)
    place[by_end] = np.arange(len(ends)) - begin
    faults.at(rows, ~waits & (place > 0), "is posted twice")
    faults.at(rows, waits & (place == 0), "waits for a message that was never posted")
    faults.at(rows, waits & (place > 1), "waits twice")
    alone = np.flatnonzero((np.bincount(ends, minlength=1)[table.end] == 1) & ~waits)
    # Report the first one only.
    for i in alone[:1].tolist():
        row = int(rows[i])
        rank = int(table.rank[row])
        action = plan.ranks[rank][table.step(row)]
        unit = f"{action.chunk} {action.microbatch}.{action.sub_microbatch}"
        faults.at_end(rank, f"the list ends without '{action.verb.wait} {unit}'")


def _check_peers(faults: _Faults, rows: IntArray) -> None:
    """Check that posts have a peer, a shape and a dtype."""
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


def _check_end(table: PlanTable, single_communicator: bool) -> None:
    """Check by a dry run that the plan ends; the error shows where it stops."""
    plan, messages = table.plan, table.messages_by_step()
    # A plan that ends with a single communicator also ends with one per pair of ranks: messages of a pair are served in
    # the same order, and no later.
    stop = dry_run(plan, "nccl serial" if single_communicator else "nccl", messages)
    if stop is None:
        return
    pairs_stop = dry_run(plan, "nccl", messages) if single_communicator else stop
    if pairs_stop is None:
        raise PlanError(
            "the plan stops if a single communicator serves a rank's messages one by one: "
            f"{stop.reason}; lower it with single_communicator=True\n{grid(plan, stop.steps)}"
        )
    lenient = dry_run(plan, "gloo", messages) is None
    rules = "under NCCL's rules (not under gloo's, which match tags)" if lenient else "under NCCL's and gloo's rules"
    raise PlanError(f"the plan stops {rules}: {pairs_stop.reason}\n{grid(plan, pairs_stop.steps)}")


def _check_layout(table: PlanTable, layout: Layout) -> None:
    plan = table.plan
    if plan.num_ranks != layout.num_ranks:
        raise PlanError(f"the plan has {plan.num_ranks} ranks, the layout {layout.num_ranks}")
    if plan.layout != layout.digest:
        raise PlanError(f"the plan is for layout {plan.layout}, this one is {layout.digest}")
    faults = _Faults(table)
    chunk_of = dict(zip(layout.chunk_names, layout.chunks, strict=True))
    home_of = [chunk_of[name].rank if name in chunk_of else -1 for name in table.chunks]
    home = np.array(home_of, np.int64)[table.chunk]
    rows, of_model = np.arange(len(table.verb)), table.verb != code(Verb.OPTIMIZER_STEP)
    faults.at(rows, of_model & (home < 0), lambda row: f"chunk {table.chunks[table.chunk[row]]!r} is not in the layout")
    elsewhere = (IS_UNIT | IS_CHUNK)[table.verb] & (home != table.rank)
    faults.at(rows, elsewhere, lambda row: f"the chunk is on rank {home[row]}")
    for rank in set(range(plan.num_ranks)) - set(table.rank[~of_model].tolist()):
        faults.at_end(rank, f"the list ends without an optimizer step '{Verb.OPTIMIZER_STEP}'")
    faults.raise_first()
    collective = set(table.rank[IS_CHUNK[table.verb]].tolist())
    for rank in range(plan.num_ranks):
        order = collective_order(layout, rank)
        if order.unshard or order.reduce or rank in collective:
            _check_collectives(plan, rank, layout.chunk_names, order)
    chunks = [chunk_of.get(name) for name in table.chunks]
    _check_strategies(table, [0 if chunk is None else chunk.num_layers for chunk in chunks])
    _check_complete(table, [chunk is not None and layout.has_backward(chunk.module) for chunk in chunks])


def _check_strategies(table: PlanTable, num_layers: list[int]) -> None:
    """Check that a forward has one strategy for all layers of its chunk, or one per layer."""
    for row in np.flatnonzero(table.verb == code(Verb.F)).tolist():
        layers = num_layers[table.chunk[row]]
        named = len(word_strategies(table.plan.ranks[table.rank[row]][table.step(row)].strategy))
        if named not in (1, layers):
            _fail_row(table, row, f"has {named} strategies, its chunk has {layers} layers")


def _check_complete(table: PlanTable, is_trained: list[bool]) -> None:
    """Check that units of trained modules have backwards and that other units have none."""
    units = np.flatnonzero(IS_UNIT[table.verb])
    done = _UnitSteps(units, table.verb[units], joint_numbers(table.unit[units]))
    start = np.minimum.reduce(list(done.first.values()))
    order = np.argsort(start)
    trained = np.array(is_trained, np.bool_)[table.chunk[start]]
    whole = done.ever(Verb.B) | (done.ever(Verb.I) & done.ever(Verb.W))
    lacking = done.ever(Verb.F) & trained & ~whole
    more = ~trained & np.logical_or.reduce([done.ever(verb) for verb in done.first if verb is not Verb.F])
    faults = _Faults(table)
    faults.at(start[order], lacking[order], "has no complete backward: neither B, nor I and W")
    faults.at(start[order], more[order], "has a backward, but nothing in or before its module is trained")
    faults.raise_first()


def _check_collectives(plan: ExecutionPlan, rank: int, names: Sequence[str], order: CollectiveOrder) -> None:
    """Check the order of collectives: UNSHARD before any computation, REDUCE_GRAD after the last."""
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
                _fail(plan, rank, step, f"is out of order, next is {following[0] if following else 'none'}")
            if stepped:
                _fail(plan, rank, step, "comes after the optimizer step")
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
    """See `pipeloom.plan.flow.Move`."""
    for transfer in routes.transfers:
        producer, consumer = forward[transfer.producer], forward[transfer.consumer]
        target = table.targets.get((routes.target(transfer, names), transfer.stream), -1)
        moves.append((producer, consumer, producer, target, 0))
        if transfer.gradient:
            moves.append((backward[transfer.consumer], backward[transfer.producer], producer, target, 1))
    _check_moves(table, np.array(moves, np.int64).reshape(-1, 5).T)


def _rows_of(table: PlanTable, chunks: list[int], verb: Verb) -> dict[Unit, int]:
    """Return the rows with a verb, by unit."""
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
    """Check for each move that the output of its source arrives before its destination starts."""
    gives, takes, producer, target, back = moves
    apart = table.rank[gives] != table.rank[takes]
    message = np.where(apart, table.number_of(table.unit[producer], target, back), -1)
    faults: list[tuple[int, int, Callable[[int], NoReturn]]] = []

    def add(bad: BoolArray, fail: Callable[[int], NoReturn]) -> None:
        if len(bad) and bad.any():
            faults.append((int(bad.argmax()), len(faults), fail))

    def early(i: int) -> NoReturn:
        problem = f"starts before step {table.step(int(gives[i]))}, whose result is its input"
        _fail_row(table, int(takes[i]), problem)

    add(~apart & (gives > takes), early)
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

        add(missing, absent)
    add(apart & (at["send"] < gives), lambda i: _fail_row(table, int(at["send"][i]), "sends before it is computed"))
    add(apart & (at["wait"] > takes), lambda i: _fail_row(table, int(takes[i]), "starts before its input has arrived"))
    if faults:
        place, _, fail = min(faults, key=lambda fault: fault[:2])
        fail(place)
    used = np.zeros(len(table.names), np.bool_)
    used[message[apart]] = True
    for verb in VERBS:
        mine = table.verb[table.messages] == code(verb)
        rows, name = table.messages[mine], table.message[mine]
        again = np.ones(len(rows), np.bool_)
        again[np.unique(name, return_index=True)[1]] = False
        idle = rows[~used[name] | again]
        if len(idle):
            _fail_row(table, int(idle[0]), "is a message without a consumer")


_ENDS = {"send": (Verb.SEND_F, Verb.SEND_B), "receive": (Verb.RECV_F, Verb.RECV_B), "wait": (Verb.WAIT_F, Verb.WAIT_B)}
"""Verbs of a message with an activation, and of a message with a gradient."""


def _last_row(table: PlanTable, verb: Verb) -> IntArray:
    """Return the last row with a verb, by message; -1 if there is none."""
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
