"""Compiled Lagrangian method for memory strategies."""

from __future__ import annotations

import numpy as np

from pipeloom.compiled import Array, callee, kernel
from pipeloom.compiled.arrays import assign
from pipeloom.search.kernels.tables import BEGIN, END, GRADIENT, Options, Tables, Work, Workspace

REPAIR_EVERY = 8
"""Number of rounds between two repairs of the choice made by the Lagrangian method."""
FIRST_STEP = 1.0
"""First step of the multipliers, relative to the step that would close the gap if the bound were linear."""


@kernel
def fill_allocated(options: Options, choice: Array, allocated: Array) -> None:
    """Compute the bytes held while the task at each place runs, under a choice."""
    span, activation, gradient = options.span, options.activation, options.gradient
    for k in range(len(allocated)):
        allocated[k] = 0
    for i in range(len(choice)):
        allocated[span[i, BEGIN]] += activation[i, choice[i]]
        allocated[span[i, GRADIENT] + 1] += gradient[i, choice[i]] - activation[i, choice[i]]
        allocated[span[i, END] + 1] -= gradient[i, choice[i]]
    if options.host_begin < len(options.capacity):
        # After the last place of the rank all memory is free, so the running sums for the host begin at 0.
        for i in range(len(choice)):
            allocated[options.host_begin + span[i, BEGIN]] += options.host[i, choice[i]]
            allocated[options.host_begin + span[i, GRADIENT] + 1] -= options.host[i, choice[i]]
    for k in range(1, len(allocated)):
        allocated[k] += allocated[k - 1]


@callee
def change(options: Options, choice: Array, allocated: Array, i: int, j: int) -> None:
    """Assign candidate j to pair i."""
    more = options.activation[i, j] - options.activation[i, choice[i]]
    for k in range(options.span[i, BEGIN], options.span[i, GRADIENT] + 1):
        allocated[k] += more
    more = options.gradient[i, j] - options.gradient[i, choice[i]]
    for k in range(options.span[i, GRADIENT] + 1, options.span[i, END] + 1):
        allocated[k] += more
    if options.host_begin < len(options.capacity):
        more = options.host[i, j] - options.host[i, choice[i]]
        for k in range(options.host_begin + options.span[i, BEGIN], options.host_begin + options.span[i, GRADIENT] + 1):
            allocated[k] += more
    choice[i] = j


@callee
def best_move(options: Options, work: Work, i: int, now: int) -> tuple[float, int]:
    """Return the gain and number of the best faster candidate of pair i that fits, by the prices; (0, -1) if none."""
    time, activation, gradient = options.time, options.activation, options.gradient
    span, capacity = options.span, options.capacity
    allocated = work.allocated
    headroom = np.int64(1) << 62
    for k in range(span[i, BEGIN], span[i, GRADIENT] + 1):
        headroom = min(headroom, capacity[k] - allocated[k])
    headroom_after = np.int64(1) << 62
    for k in range(span[i, GRADIENT] + 1, span[i, END] + 1):
        headroom_after = min(headroom_after, capacity[k] - allocated[k])
    on_host = options.host_begin < len(capacity)
    headroom_host = np.int64(1) << 62
    if on_host:
        for k in range(options.host_begin + span[i, BEGIN], options.host_begin + span[i, GRADIENT] + 1):
            headroom_host = min(headroom_host, capacity[k] - allocated[k])
    gain, found = 0.0, -1
    for j in range(time.shape[1]):
        saved = time[i, now] - time[i, j]
        more = activation[i, j] - activation[i, now]
        after = gradient[i, j] - gradient[i, now]
        if saved <= 0 or (more > 0 and more > headroom) or (after > 0 and after > headroom_after):
            continue
        cost = work.price[i] * max(0, more)
        if on_host:
            host = options.host[i, j] - options.host[i, now]
            if host > 0 and host > headroom_host:
                continue
            cost += work.host_price[i] * max(0, host)
        worth = saved / (1.0 + cost)
        if worth > gain:
            gain, found = worth, j
    return gain, found


@kernel
def repair(options: Options, work: Work, choice: Array) -> None:
    """Make a choice fit, then use the remaining memory.

    At each place that exceeds its capacity, pairs take smaller candidates, the cheapest per byte first, at worst their
    minimum-memory candidate. Then pairs take faster candidates as long as these fit, the best by the prices first.
    """
    time, activation, gradient = options.time, options.activation, options.gradient
    span, minimum_memory = options.span, options.minimum_memory
    allocated, gain, move = work.allocated, work.gain, work.move
    num_pairs, num_options = time.shape
    fill_allocated(options, choice, allocated)
    on_host = options.host_begin < len(options.capacity)
    if on_host:
        leave_host(options, allocated, choice)
    for k in range(options.host_begin):
        while allocated[k] > options.capacity[k]:
            best, best_i, best_j = np.inf, -1, -1
            for i in range(num_pairs):
                if span[i, BEGIN] <= k <= span[i, GRADIENT]:
                    now = choice[i]
                    for j in range(num_options):
                        less = activation[i, now] - activation[i, j]
                        if on_host and options.host[i, j] > options.host[i, now]:
                            continue
                        if less > 0 and gradient[i, j] <= gradient[i, now]:
                            cost = (time[i, j] - time[i, now]) / less
                            if cost < best:
                                best, best_i, best_j = cost, i, j
                elif span[i, GRADIENT] < k <= span[i, END] and gradient[i, minimum_memory[i]] < gradient[i, choice[i]]:
                    best, best_i, best_j = -1.0, i, minimum_memory[i]
            if best_i < 0:
                assign(choice, minimum_memory)
                fill_allocated(options, choice, allocated)
                break
            change(options, choice, allocated, best_i, best_j)
    for i in range(num_pairs):
        gain[i], move[i] = best_move(options, work, i, choice[i])
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
        gain[top], move[top] = best_move(options, work, top, choice[top])
        if gain[top] >= before:
            change(options, choice, allocated, top, move[top])
            gain[top], move[top] = best_move(options, work, top, choice[top])


@callee
def leave_host(options: Options, allocated: Array, choice: Array) -> None:
    """Move pairs off the host at places that exceed its capacity, the cheapest per byte first."""
    time, host, span = options.time, options.host, options.span
    for place in range(len(options.capacity) - options.host_begin):
        k = options.host_begin + place
        while allocated[k] > options.capacity[k]:
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
            change(options, choice, allocated, best_i, best_j)


@callee
def total_of(choice: Array, time: Array) -> int:
    """Return the total time of all pairs, in ns."""
    total = 0
    for i in range(len(choice)):
        total += time[i, choice[i]]
    return total


@callee
def lagrangian(options: Options, work: Work, rounds: int) -> float:
    """Write the best choice into ``work.best``; return a lower bound of the total time of any choice that fits."""
    time, trial, allocated = options.time, work.trial, work.allocated
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
        work.price[i] = 0.0
        work.host_price[i] = 0.0
    fill_allocated(options, trial, allocated)
    fits = True
    for k in range(len(options.capacity)):
        fits &= allocated[k] <= options.capacity[k]
        work.multiplier[k] = 0.0
    if fits:
        assign(work.best, trial)
        return float(fastest)
    assign(work.best, options.minimum_memory)
    repair(options, work, work.best)
    return ascend(options, work, rounds, scale)


@callee
def ascend(options: Options, work: Work, rounds: int, scale: float) -> float:
    """Run subgradient ascent of the multipliers; improve ``work.best`` by repaired choices and return the best bound.

    ``scale`` is the difference between the slowest and the fastest choice, in ns.
    """
    time, activation, gradient = options.time, options.activation, options.gradient
    span, capacity = options.span, options.capacity
    best, trial, allocated, multiplier, running = work.best, work.trial, work.allocated, work.multiplier, work.running
    num_pairs, num_options = time.shape
    num_places = len(capacity)
    host_begin = options.host_begin
    on_host = host_begin < num_places
    upper = total_of(best, time)
    lower = -1e300
    step = FIRST_STEP
    stale = 0
    for turn in range(rounds):
        running[0] = 0.0
        for k in range(num_places):
            running[k + 1] = running[k] + multiplier[k]
        value = 0.0
        for i in range(num_pairs):
            held = running[span[i, GRADIENT] + 1] - running[span[i, BEGIN]]
            after = running[span[i, END] + 1] - running[span[i, GRADIENT] + 1]
            work.price[i] = held
            if on_host:
                work.host_price[i] = running[host_begin + span[i, GRADIENT] + 1] - running[host_begin + span[i, BEGIN]]
            least = np.inf
            for j in range(num_options):
                cost = time[i, j] + held * activation[i, j] + after * gradient[i, j]
                if on_host:
                    cost += work.host_price[i] * options.host[i, j]
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
        fill_allocated(options, trial, allocated)
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
        if turn % REPAIR_EVERY == REPAIR_EVERY - 1 or turn == rounds - 1 or not over:
            repair(options, work, trial)
            total = total_of(trial, time)
            if total < upper:
                upper = total
                assign(best, trial)
        if upper <= np.ceil(lower - 1e-6):
            return lower
    return lower


@kernel
def lay_out(tables: Tables, workspace: Workspace, order: Array, rank: int) -> int:
    """Write the places of the tasks of a rank, the spans of its pairs, and capacities; return the number of capacities.

    If the rank stages data, its staging memory is subtracted from the capacities.
    """
    num_places = len(order)
    for k in range(num_places):
        workspace.place[order[k]] = k
        workspace.capacity[k] = tables.capacity[rank] - tables.staging[rank]
    for e in range(len(tables.edge_rank)):
        if tables.edge_rank[e] == rank:
            for k in range(workspace.place[tables.edge_source[e]] + 1, workspace.place[tables.edge_target[e]] + 1):
                workspace.capacity[k] -= tables.edge_bytes[e]
    for i in range(tables.rank_start[rank], tables.rank_start[rank + 1]):
        for which in range(3):
            task = tables.tasks[i, which]
            workspace.span[i, which] = workspace.span[i, which - 1] if task < 0 else workspace.place[task]
    if tables.host_capacity[rank] < 0:
        return num_places
    for k in range(num_places, 2 * num_places):
        workspace.capacity[k] = tables.host_capacity[rank]
    return 2 * num_places


@callee
def choose_way(
    tables: Tables, workspace: Workspace, order: Array, rank: int, staying: bool, rounds: int
) -> tuple[float, bool]:
    """Choose for a rank, with pairs that stay off the host (``staying``) or may offload.

    Return the bound and whether the choice fits.
    """
    a, b, n = tables.rank_start[rank], tables.rank_start[rank + 1], len(order)
    places = lay_out(tables, workspace, order, rank)
    time, activation, gradient = tables.time[a:b], tables.activation[a:b], tables.gradient[a:b]
    if staying:
        time, activation = tables.staying_time[a:b], tables.staying_activation[a:b]
        gradient = tables.staying_gradient[a:b]
        places = n
        for k in range(n):
            workspace.capacity[k] += tables.staging[rank]
    options = Options(
        time,
        activation,
        gradient,
        tables.minimum_memory[a:b],
        workspace.span[a:b],
        workspace.capacity[:places],
        tables.host[a:b],
        n,
    )
    work = Work(
        workspace.choice[a:b],
        workspace.trial[a:b],
        workspace.allocated[: places + 1],
        workspace.multiplier[: places + 1],
        workspace.running[: places + 1],
        workspace.price[a:b],
        workspace.host_price[a:b],
        workspace.gain[a:b],
        workspace.move[a:b],
    )
    bound = lagrangian(options, work, rounds)
    fits = True
    fill_allocated(options, work.best, work.allocated)
    for k in range(places):
        fits &= work.allocated[k] <= options.capacity[k]
    return bound, fits


@kernel
def choose_rank(tables: Tables, workspace: Workspace, order: Array, rank: int, rounds: int) -> tuple[float, bool]:
    """Write the choice of the pairs of a rank into ``workspace.choice``; return the bound, and whether it fits.

    If the rank needs staging memory as soon as a pair offloads, two ways are tried. Either all pairs stay off the host
    and have the whole capacity, or they may offload and the staging memory is reserved. The faster way that fits is
    chosen.
    """
    if not tables.stays[rank]:
        return choose_way(tables, workspace, order, rank, False, rounds)
    a, b = tables.rank_start[rank], tables.rank_start[rank + 1]
    bound, fits = choose_way(tables, workspace, order, rank, True, rounds)
    total, fastest = 0, 0
    for i in range(a, b):
        workspace.other[i] = tables.staying[i, workspace.choice[i]]
        workspace.choice[i] = workspace.other[i]
        total += tables.time[i, workspace.choice[i]]
        least = tables.time[i, 0]
        for j in range(tables.time.shape[1]):
            least = min(least, tables.time[i, j])
        fastest += least
    if fits and total == fastest:
        return bound, True
    other, other_fits = choose_way(tables, workspace, order, rank, False, rounds)
    if fits and (not other_fits or total <= total_of(workspace.choice[a:b], tables.time[a:b])):
        for i in range(a, b):
            workspace.choice[i] = workspace.other[i]
    return min(bound, other), fits or other_fits
