"""Compiled tabu search on the order of tasks of every rank: moves to the ends of critical blocks.

A block is a run of consecutive tasks of one rank on a longest path. A schedule can become shorter only if, on each
longest path, some task moves before the first or behind the last task of its block (Grabowski, Nowicki and Zdrzalka
1986). These are the moves. An estimate of each move considers only the tasks that it passes (Balas and Vazacopoulos
1998). The search makes the best move that is not forbidden, even if the schedule becomes longer, and forbids the
reverse move for some time. If it finds no improvement, it blends the order with one of the best so far (similar to path
relinking, Peng, Lu and Cheng 2015), shifts starts as in `pipeloom.search.kernels.perturb`, and restarts from the
result. In large graphs, only tasks in a window move, so that not all tasks must be timed after a move, and a restart
opens another window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeloom.compiled import Array, callee, inlined, kernel, pointer, pointers
from pipeloom.compiled.arrays import assign
from pipeloom.compiled.random import draw
from pipeloom.search.kernels.blocks import (
    Blocks,
    longest_path,
    measure,
    open_window,
    rank_of,
    remeasure,
    replace_window,
)
from pipeloom.search.kernels.by_task import Ranks, decode_by_task
from pipeloom.search.kernels.codes import DEADLOCK, NEVER
from pipeloom.search.kernels.perturb import Table, shift_starts, sort_shifted
from pipeloom.search.kernels.terms import Terms, allowance
from pipeloom.search.moves import BLOCK_MOVES, START_MOVES, estimate_block, propose_block
from pipeloom.search.moves.block import Block
from pipeloom.search.moves.move import IMPROVED, TRIED, Tally
from pipeloom.search.packed import PackedGraph

FORBIDDEN = 1 << 16
"""Number of entries of the table of forbidden moves; a power of two."""
BEST, NOW, SINCE, LOCAL, HOME, OPENED, LOW, HIGH = range(1, 9)
"""Entries of ``Tour.state``. Entry 0 is the current makespan. The others are the best makespan; the number of moves;
the move of the last restart or of the best schedule since; the best makespan since; the makespan of the order from
which restarts begin; the number of windows opened; and the range of turns in which the order may differ from the best.
"""
GOLDEN = 0.6180339887498949
"""Distance between consecutive windows, as a fraction of all tasks, so that windows are evenly spread. If windows are
adjacent, it is a fraction of a window, so that the borders of the next sweep differ from those of this one."""
SIDE_BY_SIDE = 10_000
"""Minimum number of tasks for adjacent windows. Timing all tasks between two distant windows would take longer than the
moves."""
POOL_SIZE = 8
"""Maximum number of orders in a pool."""
BLEND_PARTS = 16
"""Shares of the two orders in a blend are multiples of one in `BLEND_PARTS`."""
SHIFTS = 4
"""Maximum number of consecutive shifts if one window holds all tasks."""
LOOKAHEAD = 4
"""Same as `JustificationParams.lookahead`, after a shift."""

NUM_START_MOVES, NUM_BLOCK_MOVES = len(START_MOVES), len(BLOCK_MOVES)
"""The tally of a tabu search has the start moves, by which it restarts, and then the block moves."""


class Rules(NamedTuple):
    """Parameters of tabu search; see `pipeloom.search.params.TabuParams`.

    ``span`` is the typical shift of a start in ns, and ``width`` the maximum number of tasks in a window.
    """

    tenure: int
    patience: int
    reach: int
    span: float
    width: int
    sweeps: int


class Pool(NamedTuple):
    """Orders of all tasks with different makespans, in ns; `NEVER` for rows without an order.

    ``turn`` has the place of every task in a topological order, shape (POOL_SIZE, num_tasks).
    """

    turn: Array
    makespan: Array


def make_pool(num_tasks: int) -> Pool:
    """Return an empty pool."""
    return Pool(np.zeros((POOL_SIZE, num_tasks), np.int64), np.full(POOL_SIZE, NEVER, np.int64))


@callee
def enter(pool: Pool, order: Array, makespan: int) -> None:
    """Replace the longest schedule of the pool by a shorter one, unless one is as long as the new one."""
    longest = 0
    for k in range(POOL_SIZE):
        if pool.makespan[k] == makespan:
            return
        if pool.makespan[k] > pool.makespan[longest]:
            longest = k
    if makespan < pool.makespan[longest]:
        pool.makespan[longest] = makespan
        for i in range(len(order)):
            pool.turn[longest, order[i]] = i


@callee
def blend(pool: Pool, turn: Array, blended: Array, random: Array) -> None:
    """Write weighted sums of the turns of an order and of one in the pool, which must not be empty."""
    other = draw(random) % POOL_SIZE
    if pool.makespan[other] == NEVER:
        other = 0  # the first order is there
    share = 1 + draw(random) % (BLEND_PARTS - 1)
    for number in range(len(turn)):
        blended[number] = (BLEND_PARTS - share) * turn[number] + share * pool.turn[other, number]


class Tour(NamedTuple):
    """The state of tabu search; see the entries of ``state`` above.

    Attributes
    ----------
    best : array, shape (num_tasks,)
        All tasks in a topological order of the best schedule.
    local, home : array, shape (num_tasks,)
        Orders of which only the part in the window is used.
    forbidden : array, shape (FORBIDDEN,)
        Number of the move until which one task may not come before another again, by a hash of the two.
    pool : Pool
        The best orders before restarts, if one window contains all tasks.
    """

    state: Array
    best: Array
    local: Array
    home: Array
    forbidden: Array
    pool: Pool


def make_tour(blocks: Blocks, makespan: int, width: int) -> Tour:
    """Start from a measured order with all tasks in the window; the next windows have up to ``width`` tasks."""
    blocks.sorted[:] = blocks.sorted[np.argsort(blocks.start[blocks.sorted], kind="stable")]
    blocks.turn[blocks.sorted] = np.arange(len(blocks.sorted))
    state = np.array([makespan, makespan, 0, 0, makespan, makespan, 0, 0, len(blocks.sorted)], np.int64)
    pool = make_pool(len(blocks.sorted) if width == len(blocks.sorted) else 0)
    best, local, home = (blocks.sorted.copy() for _ in range(3))
    return Tour(state, best, local, home, np.zeros(FORBIDDEN, np.int64), pool)


@inlined
def slot(first: int, second: int) -> Any:
    """Return the entry of the table of forbidden moves for ``first`` before ``second``."""
    return (first * 40503 + second * 9973) & (FORBIDDEN - 1)


@callee
def is_forbidden(blocks: Blocks, forbidden: Any, now: int, source: int, goal: int) -> bool:
    """Return whether a move would undo a recent one. ``forbidden`` points to ``Tour.forbidden``."""
    moved = blocks.order[source]
    if source < goal:
        for k in range(source + 1, goal + 1):
            if forbidden[slot(blocks.order[k], moved)] > now:
                return True
    else:
        for k in range(goal, source):
            if forbidden[slot(moved, blocks.order[k])] > now:
                return True
    return False


@callee
def move_task(blocks: Blocks, forbidden: Any, source: int, goal: int, until: int) -> None:
    """Move a task, shift the tasks between by one, and forbid the reverse move."""
    moved = blocks.order[source]
    step = 1 if source < goal else -1
    i = source
    while i != goal:
        other = blocks.order[i + step]
        forbidden[slot(moved, other) if step > 0 else slot(other, moved)] = until
        blocks.order[i] = other
        blocks.place[other] = i
        i += step
    blocks.order[goal] = moved
    blocks.place[moved] = goal


@callee
def take(blocks: Blocks, order: Array) -> None:
    """Load an order without measuring it."""
    assign(blocks.order, order)
    for i in range(len(order)):
        blocks.place[order[i]] = i


@callee
def shifted(
    packed: PackedGraph, blocks: Blocks, ranks: Ranks, table: Table, tally: Tally, span: float, makespan: int
) -> int:
    """Shift starts of the measured order, which has a makespan, and repair it; return the new makespan."""
    assign(table.current, blocks.order)
    assign(table.when, blocks.start)
    which = shift_starts(packed, table, tally, span)
    repaired = repair(packed, blocks, ranks, table)
    tally.counts[which, IMPROVED] += repaired < makespan
    return int(repaired)


@callee
def repair(packed: PackedGraph, blocks: Blocks, ranks: Ranks, table: Table) -> int:
    """Use ``table.made`` as priorities and load the result, if list scheduling has one; return the makespan."""
    assign(table.order, table.made)
    lookahead = 1 + draw(table.random) % LOOKAHEAD
    if decode_by_task(packed, ranks, table.order, table.made, lookahead, NEVER, None) >= 0:
        take(blocks, table.made)
    return int(measure(packed, blocks))


@callee
def slide(blocks: Blocks, tour: Tour, width: int) -> None:
    """Open the next window of up to ``width`` tasks."""
    state, num_tasks = tour.state, blocks.num_tasks
    state[OPENED] += 1
    circle = num_tasks if num_tasks < SIDE_BY_SIDE else width
    middle = int(GOLDEN * float(circle) * float(state[OPENED])) % num_tasks
    low = middle - width // 2
    state[0] = open_window(blocks, max(low, 0), min(low + width, num_tasks))
    state[LOW] = min(state[LOW], blocks.window[0])
    state[HIGH] = max(state[HIGH], blocks.window[1])
    state[HOME] = state[0]
    copy_window(blocks, blocks.sorted, tour.home)


@inlined
def patience(rules: Rules, tour: Tour, num_tasks: int) -> Any:
    """Return the number of moves without improvement after which to restart. It is lower in the first sweeps."""
    sweeps = tour.state[OPENED] * rules.width // num_tasks
    return rules.patience * min(sweeps + 1, rules.sweeps) // rules.sweeps


@callee
def restart(
    packed: PackedGraph,
    blocks: Blocks,
    ranks: Ranks,
    table: Table,
    tally: Tally,
    tour: Tour,
    rules: Rules,
    terms: Terms,
) -> None:
    """Restart from the home order, in another window or, if one window contains all tasks, after a blend and shifts.

    The best order since the last restart becomes the home order, unless it is much longer.
    """
    state, random = tour.state, table.random
    view = pointers(blocks)
    note(view, tour)
    if state[LOCAL] <= state[HOME] + allowance(terms, random):
        state[HOME] = state[LOCAL]
        copy_window(view, tour.local, tour.home)
    state[0] = replace_window(view, tour.home)
    if rules.width < view.num_tasks:
        slide(view, tour, rules.width)
    else:
        enter(tour.pool, tour.local, state[LOCAL])
        if draw(random) % 2 == 0:
            assign(table.current, blocks.order)
            blend(tour.pool, blocks.turn, table.shifted, random)
            sort_shifted(packed, table)
            state[0] = repair(packed, blocks, ranks, table)
        for _ in range(1 + draw(random) % SHIFTS):
            state[0] = shifted(packed, blocks, ranks, table, tally, rules.span, state[0])
    state[SINCE] = state[NOW]
    state[LOCAL] = NEVER


@callee
def copy_window(blocks: Blocks, source: Any, target: Any) -> None:
    """Copy the part of a sequence in the window."""
    for i in range(blocks.window[0], blocks.window[1]):
        target[i] = source[i]


@callee
def note(blocks: Blocks, tour: Tour) -> None:
    """Save the best schedule since the last restart if it is the best so far, judged by the window."""
    state = tour.state
    if state[LOCAL] < state[BEST]:
        state[BEST] = state[LOCAL]
        for i in range(state[LOW], state[HIGH]):
            tour.best[i] = blocks.sorted[i]
        copy_window(blocks, tour.local, tour.best)
        state[LOW] = blocks.window[0]
        state[HIGH] = blocks.window[1]


@kernel
def tabu(
    packed: PackedGraph,
    blocks: Blocks,
    ranks: Ranks,
    table: Table,
    tally: Tally,
    tour: Tour,
    rules: Rules,
    terms: Terms,
) -> int:
    """Make up to the given number of moves or restarts; return how many were made."""
    state, random = tour.state, table.random
    view = pointers(blocks)
    order, path, forbidden = view.order, view.path, pointer(tour.forbidden)
    if view.window[1] - view.window[0] > rules.width:
        slide(view, tour, rules.width)
    made = 0
    while made < terms.num_evaluations and state[BEST] > terms.target:
        made += 1
        state[NOW] += 1
        best = NEVER
        source = goal = which = -1
        num_forbidden = 0
        ties = 0
        if state[NOW] - state[SINCE] <= patience(rules, tour, view.num_tasks):
            length = longest_path(view, state[0], random)
            begins = length > 0 and follows(order[path[length - 1]], view.released, view.start)
            ends = length > 0 and follows(order[path[0]], view.left, view.tail)
            last = 0
            # The path goes back in time, so a block begins with its last task.
            while last < length:
                first = last
                while first + 1 < length and path[first + 1] == path[first] - 1 and on_one_rank(view, path[first]):
                    first += 1
                i = path[first]
                j = path[last]
                # A move before the first block or behind the last one gains nothing.
                block = Block(i, j, first < length - 1 or begins, last > 0 or ends)
                for k in range(1, min(j - i, rules.reach) + 1):
                    for move in range(NUM_BLOCK_MOVES):
                        one, two = propose_block(move, block, k)
                        if one < 0:
                            continue
                        guess = estimate_block(move, view, one, two, best)
                        if guess == DEADLOCK:
                            continue
                        if guess > best or (
                            guess >= state[BEST] and is_forbidden(view, forbidden, state[NOW], one, two)
                        ):
                            # If all moves are forbidden, draw one of them.
                            num_forbidden += 1
                            if best == NEVER and draw(random) % num_forbidden == 0:
                                source, goal, which = one, two, move
                            continue
                        if guess < best:
                            best = guess
                            ties = 0
                        ties += 1
                        if draw(random) % ties == 0:
                            source, goal, which = one, two, move
                last = first + 1
        if source < 0:
            restart(packed, blocks, ranks, table, tally, tour, rules, terms)
        else:
            move_task(view, forbidden, source, goal, state[NOW] + rules.tenure + draw(random) % rules.tenure)
            before = state[0]
            state[0] = remeasure(view, source, goal)
            tally.counts[NUM_START_MOVES + which, TRIED] += 1
            tally.counts[NUM_START_MOVES + which, IMPROVED] += state[0] < before
        if state[0] < state[LOCAL]:
            state[LOCAL] = state[0]
            state[SINCE] = state[NOW]
            copy_window(view, view.sorted, tour.local)
            if state[0] <= terms.target:
                break
    note(view, tour)
    return made


@inlined
def follows(number: int, alone: Any, all_in_all: Any) -> Any:
    """Return whether a path continues beyond a task by an edge of the graph rather than by the order of its rank."""
    return 0 < all_in_all[number] == alone[number]


@inlined
def on_one_rank(blocks: Blocks, at: int) -> Any:
    """Return whether the task at a place and the previous one are on the same rank."""
    return rank_of(blocks, blocks.order[at]) == rank_of(blocks, blocks.order[at - 1])
