"""Compiled Lagrangian method for memory strategies, and timing of an order under them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import callee, kernel
from pipeloom.compiled.arrays import assign
from pipeloom.search.kernels.exchange import exchange
from pipeloom.search.kernels.tables import BEGIN, END, GRADIENT, Ascent, Options, Tables, Work, Workspace
from pipeloom.search.kernels.tighten import tighten

Array = npt.NDArray[Any]


@kernel
def fill_allocated(o: Options, choice: Array, allocated: Array) -> None:
    """Compute the bytes held while the task at each place runs, under a choice."""
    span, activation, gradient = o.span, o.activation, o.gradient
    for k in range(len(allocated)):
        allocated[k] = 0
    for i in range(len(choice)):
        allocated[span[i, BEGIN]] += activation[i, choice[i]]
        allocated[span[i, GRADIENT] + 1] += gradient[i, choice[i]] - activation[i, choice[i]]
        allocated[span[i, END] + 1] -= gradient[i, choice[i]]
    if o.host_begin < len(o.capacity):
        # After the last place of the rank all memory is free, so the running sums for the host begin at 0.
        for i in range(len(choice)):
            allocated[o.host_begin + span[i, BEGIN]] += o.host[i, choice[i]]
            allocated[o.host_begin + span[i, GRADIENT] + 1] -= o.host[i, choice[i]]
    for k in range(1, len(allocated)):
        allocated[k] += allocated[k - 1]


@callee
def change(o: Options, choice: Array, allocated: Array, i: int, j: int) -> None:
    """Assign candidate j to pair i."""
    more = o.activation[i, j] - o.activation[i, choice[i]]
    for k in range(o.span[i, BEGIN], o.span[i, GRADIENT] + 1):
        allocated[k] += more
    more = o.gradient[i, j] - o.gradient[i, choice[i]]
    for k in range(o.span[i, GRADIENT] + 1, o.span[i, END] + 1):
        allocated[k] += more
    if o.host_begin < len(o.capacity):
        more = o.host[i, j] - o.host[i, choice[i]]
        for k in range(o.host_begin + o.span[i, BEGIN], o.host_begin + o.span[i, GRADIENT] + 1):
            allocated[k] += more
    choice[i] = j


@callee
def best_move(o: Options, w: Work, i: int, now: int) -> tuple[float, int]:
    """Return the gain and number of the best faster candidate of pair i that fits, by the prices; (0, -1) if none."""
    time, activation, gradient, span, capacity = o.time, o.activation, o.gradient, o.span, o.capacity
    allocated = w.allocated
    headroom = np.int64(1) << 62
    for k in range(span[i, BEGIN], span[i, GRADIENT] + 1):
        headroom = min(headroom, capacity[k] - allocated[k])
    headroom_after = np.int64(1) << 62
    for k in range(span[i, GRADIENT] + 1, span[i, END] + 1):
        headroom_after = min(headroom_after, capacity[k] - allocated[k])
    on_host = o.host_begin < len(capacity)
    headroom_host = np.int64(1) << 62
    if on_host:
        for k in range(o.host_begin + span[i, BEGIN], o.host_begin + span[i, GRADIENT] + 1):
            headroom_host = min(headroom_host, capacity[k] - allocated[k])
    gain, found = 0.0, -1
    for j in range(time.shape[1]):
        saved = time[i, now] - time[i, j]
        more = activation[i, j] - activation[i, now]
        after = gradient[i, j] - gradient[i, now]
        if saved <= 0 or (more > 0 and more > headroom) or (after > 0 and after > headroom_after):
            continue
        cost = w.price[i] * max(0, more)
        if on_host:
            host = o.host[i, j] - o.host[i, now]
            if host > 0 and host > headroom_host:
                continue
            cost += w.host_price[i] * max(0, host)
        worth = saved / (1.0 + cost)
        if worth > gain:
            gain, found = worth, j
    return gain, found


@kernel
def repair(o: Options, w: Work, choice: Array) -> None:
    """Make a choice fit, then use the remaining memory.

    At each place that exceeds its capacity, pairs take smaller candidates, the cheapest per byte first, at worst their
    minimum-memory candidate. Then pairs take faster candidates as long as these fit, the best by the prices first.
    """
    time, activation, gradient, span, lean = o.time, o.activation, o.gradient, o.span, o.lean
    allocated, gain, move = w.allocated, w.gain, w.move
    num_pairs, num_options = time.shape
    fill_allocated(o, choice, allocated)
    on_host = o.host_begin < len(o.capacity)
    if on_host:
        leave_host(o, allocated, choice)
    for k in range(o.host_begin):
        while allocated[k] > o.capacity[k]:
            best, best_i, best_j = np.inf, -1, -1
            for i in range(num_pairs):
                if span[i, BEGIN] <= k <= span[i, GRADIENT]:
                    now = choice[i]
                    for j in range(num_options):
                        less = activation[i, now] - activation[i, j]
                        if on_host and o.host[i, j] > o.host[i, now]:
                            continue
                        if less > 0 and gradient[i, j] <= gradient[i, now]:
                            cost = (time[i, j] - time[i, now]) / less
                            if cost < best:
                                best, best_i, best_j = cost, i, j
                elif span[i, GRADIENT] < k <= span[i, END] and gradient[i, lean[i]] < gradient[i, choice[i]]:
                    best, best_i, best_j = -1.0, i, lean[i]
            if best_i < 0:
                assign(choice, lean)
                fill_allocated(o, choice, allocated)
                break
            change(o, choice, allocated, best_i, best_j)
    for i in range(num_pairs):
        gain[i], move[i] = best_move(o, w, i, choice[i])
    while True:
        # Each step saves time, so the loop ends. Free memory only decreases, so an old gain of a pair is an upper bound
        # of its current gain. The pair with the largest gain is evaluated again and steps up if its gain is unchanged.
        top = 0
        for i in range(1, num_pairs):
            if gain[i] > gain[top]:
                top = i
        if gain[top] <= 0.0:
            return
        before = gain[top]
        gain[top], move[top] = best_move(o, w, top, choice[top])
        if gain[top] >= before:
            change(o, choice, allocated, top, move[top])
            gain[top], move[top] = best_move(o, w, top, choice[top])


@callee
def leave_host(o: Options, allocated: Array, choice: Array) -> None:
    """Move pairs off the host at places that exceed its capacity, the cheapest per byte first."""
    time, host, span = o.time, o.host, o.span
    for place in range(len(o.capacity) - o.host_begin):
        k = o.host_begin + place
        while allocated[k] > o.capacity[k]:
            best, best_i, best_j = np.inf, -1, -1
            for i in range(len(choice)):
                if span[i, BEGIN] <= place <= span[i, GRADIENT]:
                    for j in range(time.shape[1]):
                        less = host[i, choice[i]] - host[i, j]
                        if less > 0:
                            cost = (time[i, j] - time[i, choice[i]]) / less
                            if cost < best:
                                best, best_i, best_j = cost, i, j
            if best_i < 0:
                break
            change(o, choice, allocated, best_i, best_j)


@callee
def total_of(choice: Array, time: Array) -> int:
    """Return the total time of all pairs, in ns."""
    total = 0
    for i in range(len(choice)):
        total += time[i, choice[i]]
    return total


@callee
def lagrangian(o: Options, w: Work, ascent: Ascent) -> float:
    """Write the best choice into ``w.best``; return a lower bound of the total time of any choice that fits.

    With at least `Ascent.thorough_rounds` rounds, it also lowers ``o.capacity`` to sums that candidates can reach.
    """
    time, trial, allocated = o.time, w.trial, w.allocated
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
        w.price[i] = 0.0
        w.host_price[i] = 0.0
    fill_allocated(o, trial, allocated)
    fits = True
    for k in range(len(o.capacity)):
        fits &= allocated[k] <= o.capacity[k]
        w.multiplier[k] = 0.0
    if fits:
        assign(w.best, trial)
        return float(fastest)
    assign(w.best, o.lean)
    repair(o, w, w.best)
    lower = -1e300
    step = ascent.first_step
    for turn in range(2):
        lower = ascend(o, w, ascent, scale, step, lower)
        if ascent.rounds < ascent.thorough_rounds or total_of(w.best, time) <= np.ceil(lower - 1e-6):
            break
        fill_allocated(o, w.best, allocated)
        if turn == 0:
            tighten(o, w, ascent.most_sum_steps)
            step = ascent.later_step
        else:
            exchange(o, w)
    return lower


@callee
def ascend(o: Options, w: Work, ascent: Ascent, scale: float, step: float, lower: float) -> float:
    """Run subgradient ascent of the multipliers; improve ``w.best`` by repaired choices and return the best bound.

    ``scale`` is the difference between the slowest and the fastest choice, in ns. ``step`` is the first step, and
    ``lower`` the bound known so far.
    """
    time, activation, gradient, span, capacity = o.time, o.activation, o.gradient, o.span, o.capacity
    best, trial, allocated, multiplier, running = w.best, w.trial, w.allocated, w.multiplier, w.running
    num_pairs, num_options = time.shape
    num_places = len(capacity)
    host_begin = o.host_begin
    on_host = host_begin < num_places
    upper = total_of(best, time)
    stale = 0
    for turn in range(ascent.rounds):
        running[0] = 0.0
        for k in range(num_places):
            running[k + 1] = running[k] + multiplier[k]
        value = 0.0
        for i in range(num_pairs):
            held = running[span[i, GRADIENT] + 1] - running[span[i, BEGIN]]
            after = running[span[i, END] + 1] - running[span[i, GRADIENT] + 1]
            w.price[i] = held
            if on_host:
                w.host_price[i] = running[host_begin + span[i, GRADIENT] + 1] - running[host_begin + span[i, BEGIN]]
            least = np.inf
            for j in range(num_options):
                cost = time[i, j] + held * activation[i, j] + after * gradient[i, j]
                if on_host:
                    cost += w.host_price[i] * o.host[i, j]
                if cost < least:
                    least = cost
                    trial[i] = j
            value += least
        for k in range(num_places):
            value -= multiplier[k] * capacity[k]
        if value > lower:
            lower = value
            stale = 0
        else:
            stale += 1
            if stale >= 5:
                step *= 0.6
                stale = 0
        fill_allocated(o, trial, allocated)
        norm = 0.0
        over = False
        for k in range(num_places):
            excess = float(allocated[k] - capacity[k])
            over |= excess > 0
            if excess > 0 or multiplier[k] > 0:
                norm += excess * excess
        if norm == 0.0:
            if total_of(trial, time) < upper:
                assign(best, trial)
            return lower
        size = step * max(upper - value, 1e-4 * scale) / norm
        for k in range(num_places):
            multiplier[k] = max(0.0, multiplier[k] + size * float(allocated[k] - capacity[k]))
        if turn % ascent.repair_every == ascent.repair_every - 1 or turn == ascent.rounds - 1 or not over:
            repair(o, w, trial)
            total = total_of(trial, time)
            if total < upper:
                upper = total
                assign(best, trial)
        if upper <= np.ceil(lower - 1e-6):
            return lower
    return lower


@kernel
def lay_out(t: Tables, d: Workspace, order: Array, rank: int) -> int:
    """Write the places of the tasks of a rank, the spans of its pairs, and capacities; return the number of capacities.

    If the rank stages data, its staging memory is subtracted from the capacities.
    """
    num_places = len(order)
    for k in range(num_places):
        d.place[order[k]] = k
        d.capacity[k] = t.capacity[rank] - t.staging[rank]
    for e in range(len(t.edge_rank)):
        if t.edge_rank[e] == rank:
            for k in range(d.place[t.edge_source[e]] + 1, d.place[t.edge_target[e]] + 1):
                d.capacity[k] -= t.edge_bytes[e]
    for i in range(t.rank_start[rank], t.rank_start[rank + 1]):
        for which in range(3):
            task = t.tasks[i, which]
            d.span[i, which] = d.span[i, which - 1] if task < 0 else d.place[task]
    if t.host_capacity[rank] < 0:
        return num_places
    for k in range(num_places, 2 * num_places):
        d.capacity[k] = t.host_capacity[rank]
    return 2 * num_places


@callee
def choose_way(t: Tables, d: Workspace, order: Array, rank: int, staying: bool, ascent: Ascent) -> tuple[float, bool]:
    """Choose for a rank, with pairs that stay off the host (``staying``) or may offload.

    Return the bound and whether the choice fits.
    """
    a, b, n = t.rank_start[rank], t.rank_start[rank + 1], len(order)
    places = lay_out(t, d, order, rank)
    time, activation, gradient = t.time[a:b], t.activation[a:b], t.gradient[a:b]
    if staying:
        time, activation, gradient = t.staying_time[a:b], t.staying_activation[a:b], t.staying_gradient[a:b]
        places = n
        for k in range(n):
            d.capacity[k] += t.staging[rank]
    options = Options(time, activation, gradient, t.lean[a:b], d.span[a:b], d.capacity[:places], t.host[a:b], n)
    work = Work(
        d.choice[a:b],
        d.trial[a:b],
        d.allocated[: places + 1],
        d.multiplier[: places + 1],
        d.running[: places + 1],
        d.price[a:b],
        d.host_price[a:b],
        d.gain[a:b],
        d.move[a:b],
        d.spare,
        d.sums,
    )
    bound = lagrangian(options, work, ascent)
    fits = True
    fill_allocated(options, work.best, work.allocated)
    for k in range(places):
        fits &= work.allocated[k] <= options.capacity[k]
    return bound, fits


@kernel
def choose_rank(t: Tables, d: Workspace, order: Array, rank: int, ascent: Ascent) -> tuple[float, bool]:
    """Write the choice of the pairs of a rank (rows of the tables) into ``d.choice``; return the bound, and whether the
    choice fits.

    If the rank needs staging memory as soon as a pair offloads, two ways are tried. Either all pairs stay off the host
    and have the whole capacity, or they may offload and the staging memory is reserved. The faster way that fits is
    chosen.
    """
    if not t.stays[rank]:
        return choose_way(t, d, order, rank, False, ascent)
    a, b = t.rank_start[rank], t.rank_start[rank + 1]
    bound, fits = choose_way(t, d, order, rank, True, ascent)
    total, fastest = 0, 0
    for i in range(a, b):
        d.other[i] = t.staying[i, d.choice[i]]
        d.choice[i] = d.other[i]
        total += t.time[i, d.choice[i]]
        least = t.time[i, 0]
        for j in range(t.time.shape[1]):
            least = min(least, t.time[i, j])
        fastest += least
    if fits and total == fastest:
        return bound, True
    other, other_fits = choose_way(t, d, order, rank, False, ascent)
    if fits and (not other_fits or total <= total_of(d.choice[a:b], t.time[a:b])):
        for i in range(a, b):
            d.choice[i] = d.other[i]
    return min(bound, other), fits or other_fits


@callee
def finish(t: Tables, d: Workspace, sequence: Array) -> int:
    """Return the makespan of a topological sequence under the choice in ``d.choice``."""
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
def choose_all(
    t: Tables, d: Workspace, sequence: Array, orders: Array, counts: Array, ascent: Ascent
) -> tuple[int, bool]:
    """Choose the strategies of all ranks for a sequence of all tasks; return the makespan and whether they fit.

    ``orders``, of shape (num_ranks, num_tasks), and ``counts`` are scratch.
    """
    for r in range(len(counts)):
        counts[r] = 0
    for task in sequence:
        r = t.rank[task]
        orders[r, counts[r]] = task
        counts[r] += 1
    fits = True
    for r in range(len(counts)):
        if counts[r] > 0:
            fits &= choose_rank(t, d, orders[r, : counts[r]], r, ascent)[1]
    return finish(t, d, sequence), fits
