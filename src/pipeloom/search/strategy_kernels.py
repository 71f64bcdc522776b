"""Compiled Lagrangian method for memory strategies, and timing of an order under them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import callee, kernel
from pipeloom.compiled.arrays import assign
from pipeloom.search.exchange_kernels import exchange
from pipeloom.search.room_kernels import tighten

Array = npt.NDArray[Any]

REPAIR_EVERY = 8
"""Rounds between two repairs of the Lagrangian's choice."""
THOROUGH = 64
"""Rounds from which on the rooms are tightened, for as many rounds again, and the choice ends with exchanges."""
STEP, LATER_STEP = 1.0, 0.3
"""First steps of the multipliers, in the length that would close the gap if the bound were linear."""


class Tables(NamedTuple):
    """Candidates of all pairs, sorted by rank, and what the choice is for.

    Attributes
    ----------
    pair : array, shape (num_pairs,)
        The graph's number of every row.
    rank_start : array, shape (num_ranks + 1,)
        Rows of rank r: ``rank_start[r]`` to ``rank_start[r + 1]``.
    time, activation, gradient : array, shape (num_pairs, num_options)
        Total nanoseconds; bytes until the end of B or I; bytes from there to the end of W.
    parts : array, shape (num_pairs, num_options, 3)
        Nanoseconds of F, of B or I, and of W.
    lean : array, shape (num_pairs,)
    tasks : array, shape (num_pairs, 3)
        F, B or I, W; -1 where there is none.
    room : array, shape (num_ranks,)
    edge_rank, edge_source, edge_target, edge_bytes : array
        Edges that hold bytes.
    rank, duration : array, shape (num_tasks,)
        Durations under no choice in particular.
    predecessor_start, predecessor, predecessor_delay : array
    """

    pair: Array
    rank_start: Array
    time: Array
    activation: Array
    gradient: Array
    parts: Array
    lean: Array
    tasks: Array
    room: Array
    edge_rank: Array
    edge_source: Array
    edge_target: Array
    edge_bytes: Array
    rank: Array
    duration: Array
    predecessor_start: Array
    predecessor: Array
    predecessor_delay: Array


class Desk(NamedTuple):
    """What `choose_rank` and `finish` write; one set per thread."""

    place: Array
    room: Array
    level: Array
    multiplier: Array
    running: Array
    span: Array
    choice: Array
    trial: Array
    price: Array
    gain: Array
    move: Array
    spare: Array
    sums: Array
    duration: Array
    end: Array
    free_at: Array


@kernel
def fill_levels(choice: Array, span: Array, activation: Array, gradient: Array, level: Array) -> None:
    """Bytes held while the task at each place runs, under a choice."""
    for k in range(len(level)):
        level[k] = 0
    for i in range(len(choice)):
        level[span[i, 0]] += activation[i, choice[i]]
        level[span[i, 1] + 1] += gradient[i, choice[i]] - activation[i, choice[i]]
        level[span[i, 2] + 1] -= gradient[i, choice[i]]
    for k in range(1, len(level)):
        level[k] += level[k - 1]


@callee
def change(
    i: int, j: int, choice: Array, span: Array, activation: Array, gradient: Array, level: Array
) -> None:
    """Give pair i candidate j."""
    more = activation[i, j] - activation[i, choice[i]]
    for k in range(span[i, 0], span[i, 1] + 1):
        level[k] += more
    more = gradient[i, j] - gradient[i, choice[i]]
    for k in range(span[i, 1] + 1, span[i, 2] + 1):
        level[k] += more
    choice[i] = j


@callee
def best_move(
    i: int, now: int, price: float, time: Array, activation: Array, gradient: Array, span: Array, level: Array,
    room: Array,
) -> tuple[float, int]:  # fmt: skip
    """The faster candidate of pair i that fits and is worth most as the price has it; (0, -1): none."""
    spare = np.int64(1) << 62
    for k in range(span[i, 0], span[i, 1] + 1):
        spare = min(spare, room[k] - level[k])
    spare_after = np.int64(1) << 62
    for k in range(span[i, 1] + 1, span[i, 2] + 1):
        spare_after = min(spare_after, room[k] - level[k])
    gain, found = 0.0, -1
    for j in range(time.shape[1]):
        saved = time[i, now] - time[i, j]
        more = activation[i, j] - activation[i, now]
        after = gradient[i, j] - gradient[i, now]
        if saved <= 0 or (more > 0 and more > spare) or (after > 0 and after > spare_after):
            continue
        worth = saved / (1.0 + price * max(0, more))
        if worth > gain:
            gain, found = worth, j
    return gain, found


@kernel
def repair(
    choice: Array, lean: Array, price: Array, time: Array, activation: Array, gradient: Array, span: Array,
    room: Array, level: Array, gain: Array, move: Array,
) -> None:  # fmt: skip
    """Make a choice fit, then use what room is left.

    Place by place, pairs that are held where too much is held step down, the cheapest per byte first, at
    worst to their leanest candidate; then, the best first as the prices have it, whatever fits steps up.
    """
    num_pairs, num_options = time.shape
    fill_levels(choice, span, activation, gradient, level)
    for k in range(len(room)):
        while level[k] > room[k]:
            best, best_i, best_j = np.inf, -1, -1
            for i in range(num_pairs):
                if span[i, 0] <= k <= span[i, 1]:
                    now = choice[i]
                    for j in range(num_options):
                        less = activation[i, now] - activation[i, j]
                        if less > 0 and gradient[i, j] <= gradient[i, now]:
                            cost = (time[i, j] - time[i, now]) / less
                            if cost < best:
                                best, best_i, best_j = cost, i, j
                elif span[i, 1] < k <= span[i, 2] and gradient[i, lean[i]] < gradient[i, choice[i]]:
                    best, best_i, best_j = -1.0, i, lean[i]
            if best_i < 0:
                assign(choice, lean)
                fill_levels(choice, span, activation, gradient, level)
                break
            change(best_i, best_j, choice, span, activation, gradient, level)
    for i in range(num_pairs):
        gain[i], move[i] = best_move(i, choice[i], price[i], time, activation, gradient, span, level, room)
    while True:
        # A step up saves time, so this ends. What fits only becomes less, so what a pair was once worth is a bound of
        # what it is worth now: the first in line is looked at again, and goes ahead if it stays first.
        top = 0
        for i in range(1, num_pairs):
            if gain[i] > gain[top]:
                top = i
        if gain[top] <= 0.0:
            return
        before = gain[top]
        gain[top], move[top] = best_move(
            top, choice[top], price[top], time, activation, gradient, span, level, room
        )
        if gain[top] >= before:
            change(top, move[top], choice, span, activation, gradient, level)
            gain[top], move[top] = best_move(
                top, choice[top], price[top], time, activation, gradient, span, level, room
            )


@callee
def total_of(choice: Array, time: Array) -> int:
    """Nanoseconds of all pairs."""
    total = 0
    for i in range(len(choice)):
        total += time[i, choice[i]]
    return total


@callee
def lagrangian(
    time: Array, activation: Array, gradient: Array, span: Array, room: Array, lean: Array, rounds: int, best: Array,
    trial: Array, level: Array, multiplier: Array, running: Array, price: Array, gain: Array, move: Array, spare: Array,
    sums: Array,
) -> float:  # fmt: skip
    """Write the best choice into ``best``, return a lower bound of the total time of any choice that fits.

    ``level``, ``multiplier`` and ``running`` have one entry more than there are places. From `THOROUGH` rounds on,
    ``room`` is lowered to what candidates can fill.
    """
    num_places = len(room)
    scale = 0.0
    fastest = 0
    for i in range(len(time)):
        low, high = time[i, 0], time[i, 0]
        trial[i] = 0
        for j in range(time.shape[1]):
            if time[i, j] < low:
                low = time[i, j]
                trial[i] = j
            high = max(high, time[i, j])
        scale += high - low
        fastest += low
        price[i] = 0.0
    fill_levels(trial, span, activation, gradient, level)
    fits = True
    for k in range(num_places):
        fits &= level[k] <= room[k]
        multiplier[k] = 0.0
    if fits:
        assign(best, trial)
        return float(fastest)
    assign(best, lean)
    repair(best, lean, price, time, activation, gradient, span, room, level, gain, move)
    lower = -1e300
    step = STEP
    for turn in range(2):
        lower = ascend(
            time, activation, gradient, span, room, lean, rounds, best, trial, level, multiplier, running, price, gain,
            move, scale, step, lower,
        )  # fmt: skip
        if rounds < THOROUGH or total_of(best, time) <= np.ceil(lower - 1e-6):
            break
        fill_levels(best, span, activation, gradient, level)
        if turn == 0:
            tighten(activation, gradient, span, room, level, multiplier, running, sums)
            step = LATER_STEP
        else:
            exchange(best, time, activation, gradient, span, room, level, spare, move)
    return lower


@callee
def ascend(
    time: Array, activation: Array, gradient: Array, span: Array, room: Array, lean: Array, rounds: int, best: Array,
    trial: Array, level: Array, multiplier: Array, running: Array, price: Array, gain: Array, move: Array, scale: float,
    step: float, lower: float,
) -> float:  # fmt: skip
    """Subgradient ascent of the multipliers; return the best bound, improve ``best`` by repaired choices.

    ``scale``: time between the slowest and the fastest choice; ``step``: first step; ``lower``: bound known before.
    """
    num_pairs, num_options = time.shape
    num_places = len(room)
    upper = total_of(best, time)
    stale = 0
    for turn in range(rounds):
        running[0] = 0.0
        for k in range(num_places):
            running[k + 1] = running[k] + multiplier[k]
        value = 0.0
        for i in range(num_pairs):
            held = running[span[i, 1] + 1] - running[span[i, 0]]
            after = running[span[i, 2] + 1] - running[span[i, 1] + 1]
            price[i] = held
            least = np.inf
            for j in range(num_options):
                cost = time[i, j] + held * activation[i, j] + after * gradient[i, j]
                if cost < least:
                    least = cost
                    trial[i] = j
            value += least
        for k in range(num_places):
            value -= multiplier[k] * room[k]
        if value > lower:
            lower = value
            stale = 0
        else:
            stale += 1
            if stale >= 5:
                step *= 0.6
                stale = 0
        fill_levels(trial, span, activation, gradient, level)
        norm = 0.0
        over = False
        for k in range(num_places):
            excess = float(level[k] - room[k])
            over |= excess > 0
            if excess > 0 or multiplier[k] > 0:
                norm += excess * excess
        if norm == 0.0:
            if total_of(trial, time) < upper:
                assign(best, trial)
            return lower
        size = step * max(upper - value, 1e-4 * scale) / norm
        for k in range(num_places):
            multiplier[k] = max(0.0, multiplier[k] + size * float(level[k] - room[k]))
        if turn % REPAIR_EVERY == REPAIR_EVERY - 1 or turn == rounds - 1 or not over:
            repair(trial, lean, price, time, activation, gradient, span, room, level, gain, move)
            total = total_of(trial, time)
            if total < upper:
                upper = total
                assign(best, trial)
        if upper <= np.ceil(lower - 1e-6):
            return lower
    return lower


@kernel
def lay_out(t: Tables, d: Desk, order: Array, first: int, last: int, rank: int) -> None:
    """Places of a rank's tasks in its order, spans of its pairs, and the room at every place."""
    num_places = len(order)
    for k in range(num_places):
        d.place[order[k]] = k
        d.room[k] = t.room[rank]
    for e in range(len(t.edge_rank)):
        if t.edge_rank[e] == rank:
            for k in range(d.place[t.edge_source[e]] + 1, d.place[t.edge_target[e]] + 1):
                d.room[k] -= t.edge_bytes[e]
    for i in range(first, last):
        for which in range(3):
            task = t.tasks[i, which]
            d.span[i, which] = d.span[i, which - 1] if task < 0 else d.place[task]


@kernel
def choose_rank(t: Tables, d: Desk, order: Array, rank: int, rounds: int) -> float:
    """Write the choice of a rank's pairs (rows of the tables) into ``d.choice``; return the bound."""
    a, b, n = t.rank_start[rank], t.rank_start[rank + 1], len(order)
    lay_out(t, d, order, a, b, rank)
    return lagrangian(
        t.time[a:b], t.activation[a:b], t.gradient[a:b], d.span[a:b], d.room[:n], t.lean[a:b], rounds, d.choice[a:b],
        d.trial[a:b], d.level[: n + 1], d.multiplier[: n + 1], d.running[: n + 1], d.price[a:b], d.gain[a:b],
        d.move[a:b], d.spare, d.sums,
    )  # fmt: skip


@callee
def finish(t: Tables, d: Desk, sequence: Array) -> int:
    """Makespan of a sequence that all ranks can follow, under the choice in ``d.choice``."""
    assign(d.duration, t.duration)
    for i in range(len(t.pair)):
        for which in range(3):
            if t.tasks[i, which] >= 0:
                d.duration[t.tasks[i, which]] = t.parts[i, d.choice[i], which]
    for r in range(len(d.free_at)):
        d.free_at[r] = 0
    makespan = 0
    for task in sequence:
        begin = d.free_at[t.rank[task]]
        for e in range(t.predecessor_start[task], t.predecessor_start[task + 1]):
            begin = max(begin, d.end[t.predecessor[e]] + t.predecessor_delay[e])
        d.end[task] = begin + d.duration[task]
        d.free_at[t.rank[task]] = d.end[task]
        makespan = max(makespan, d.end[task])
    return makespan


@kernel
def tune(t: Tables, d: Desk, sequence: Array, orders: Array, counts: Array, rounds: int) -> int:
    """Choose the strategies of all ranks for a sequence of all tasks; return the makespan under them.

    ``orders``, of shape (num_ranks, num_tasks), and ``counts`` are scratch.
    """
    for r in range(len(counts)):
        counts[r] = 0
    for task in sequence:
        r = t.rank[task]
        orders[r, counts[r]] = task
        counts[r] += 1
    for r in range(len(counts)):
        if counts[r] > 0:
            choose_rank(t, d, orders[r, : counts[r]], r, rounds)
    return finish(t, d, sequence)
