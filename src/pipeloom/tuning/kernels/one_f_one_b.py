"""Simulation of one 1F1B iteration with encoders on the first rank, by recurrence.

A microbatch passes the ranks of the backbone forward and back. Its encoder parts run on rank 0 before its forward. If
the encoders are trained, their backwards run on rank 0 after its backward. 1F1B determines the order of every rank
except for the encoder parts, so one pass over the microbatches gives all times. When rank 0 reaches a backward, the
arrival time of its gradient is already known, and so is the idle time before it.

This is not list scheduling, and takes about a tenth of its time: 10 ns per task, where `decode_by_task` takes 97
(``python -m benchmarks list_scheduling``).
"""

from __future__ import annotations

from pipeloom.compiled import Array, inlined, kernel
from pipeloom.tuning.kernels.chain import Chain, Scratch

INFEASIBLE = -1
WINDOW = 32
"""Maximum number of microbatches by which encoder parts may run early."""
ENCODE, FORWARD, BACKWARD, ENCODE_BACK = 0, 1, 2, 3
"""Kinds of events of rank 0."""
EXTRA, OVERRUN, EARLY, LATE = 0, 1, 2, 3
"""Entries of ``settings``: the number of forwards ahead in addition to those of 1F1B; the percentage of an encoder part
that may run beyond an idle interval; whether encoder forwards run early; and whether encoder backwards wait for idle
time."""
NUM_SETTINGS = 4


@kernel
def _held_bytes(chain: Chain, part: int) -> int:
    """Return the bytes that an encoder part holds between its forward and the turn of its microbatch."""
    return int(chain.part_output[part] + (chain.part_bytes[part] if chain.trained else 0))


@kernel
def _needs_at_turns(chain: Chain, order: Array, ahead: int, needs: Array) -> bool:
    """Write the memory of rank 0 at the turn of every microbatch if no encoder part runs early or late.

    Return whether it fits.
    """
    held = chain.static[0]
    for n in range(len(order)):
        if n - ahead - 1 >= 0:
            gone = order[n - ahead - 1]
            held -= chain.activation[gone, 0]
            if chain.trained:
                for q in range(chain.part_start[gone], chain.part_start[gone + 1]):
                    held -= chain.part_bytes[q]
        m = order[n]
        own = 0
        most = 0
        for q in range(chain.part_start[m], chain.part_start[m + 1]):
            most = max(most, own + chain.part_bytes[q])
            own += _held_bytes(chain, q)
        needs[n] = held + max(most, own + chain.activation[m, 0])
        if needs[n] > chain.capacity[0]:
            return False
        held += chain.activation[m, 0]
        if chain.trained:
            for q in range(chain.part_start[m], chain.part_start[m + 1]):
                held += chain.part_bytes[q]
    return True


@kernel
def _fits_early(chain: Chain, order: Array, needs: Array, turn: int, at: int, part: int, used: int) -> bool:
    """Return whether a part of the microbatch at position ``at`` fits when rank 0 is at position ``turn``.

    ``part`` is the next part to run. All earlier parts have run.
    """
    if used + chain.part_bytes[part] + chain.part_output[part] > chain.capacity[0]:
        return False
    early = _held_bytes(chain, part)
    for q in range(chain.part_start[order[at]], part):
        early += _held_bytes(chain, q)
    for n in range(at - 1, turn - 1, -1):
        if needs[n] + early > chain.capacity[0]:
            return False
        for q in range(chain.part_start[order[n]], chain.part_start[order[n] + 1]):
            early += _held_bytes(chain, q)
    return True


@inlined
def _encode(chain: Chain, scratch: Scratch, part: int, count: int) -> int:
    """Run an encoder part on rank 0 now, as event number ``count``; return the number of the next event."""
    scratch.free[0] += chain.part_forward[part]
    scratch.used[0] += _held_bytes(chain, part)
    scratch.events[count, 0], scratch.events[count, 1] = ENCODE, part
    return count + 1


@inlined
def _encode_back(chain: Chain, scratch: Scratch, part: int, count: int) -> int:
    """Run the backward of an encoder part on rank 0 now, as event number ``count``; return the number of the next."""
    scratch.free[0] += chain.part_backward[part]
    scratch.used[0] -= chain.part_bytes[part]
    scratch.events[count, 0], scratch.events[count, 1] = ENCODE_BACK, part
    return count + 1


@kernel
def run(chain: Chain, order: Array, settings: Array, scratch: Scratch, ceiling: int) -> tuple[int, int]:
    """Return the makespan of an order of microbatches, or `INFEASIBLE`, and the number of events of rank 0.

    Return ``ceiling`` as soon as the makespan cannot be below it. Events are (kind, microbatch or part).
    """
    num_microbatches, num_ranks = chain.forward.shape
    forward_end, backward_end = scratch.forward_end, scratch.backward_end
    free, used, events, pending = scratch.free, scratch.used, scratch.events, scratch.pending
    extra = settings[EXTRA]
    if not _needs_at_turns(chain, order, num_ranks - 1 + extra, scratch.needs):
        return INFEASIBLE, 0
    last = num_ranks - 1
    # Remaining work of a rank, plus the backward pass of the last microbatch from there to rank 0.
    left = scratch.left
    home = 0
    for p in range(num_ranks):
        free[p] = 0
        used[p] = chain.static[p]
        left[p] = home
        home += chain.backward[order[num_microbatches - 1], p] + chain.delay[order[num_microbatches - 1], p]
    for m in range(num_microbatches):
        for p in range(num_ranks):
            left[p] += chain.forward[m, p] + chain.backward[m, p]
    count = 0
    at = 0
    part = chain.part_start[order[0]]
    pending_head = 0
    pending_tail = 0
    for i in range(num_microbatches + num_ranks + extra):
        for p in range(num_ranks):
            back = i - (last - p + extra) - 1
            if 0 <= back < num_microbatches:
                m = order[back]
                arrival = free[p] if p == last else backward_end[back, p + 1] + chain.delay[m, p]
                if p == 0:
                    # Fill the idle time before a backward of rank 0. No other rank depends on its end.
                    while free[0] < arrival:
                        while at < num_microbatches and part == chain.part_start[order[at] + 1]:
                            at += 1
                            if at < num_microbatches:
                                part = chain.part_start[order[at]]
                        if settings[EARLY] and at < num_microbatches and at <= i + WINDOW:
                            over = free[0] + chain.part_forward[part] - arrival
                            within = over * 100 <= settings[OVERRUN] * chain.part_forward[part]
                            if (at == i or within) and _fits_early(chain, order, scratch.needs, i, at, part, used[0]):
                                count = _encode(chain, scratch, part, count)
                                part += 1
                                continue
                        if pending_head < pending_tail:
                            q = pending[pending_head]
                            over = free[0] + chain.part_backward[q] - arrival
                            if i >= num_microbatches or over * 100 <= settings[OVERRUN] * chain.part_backward[q]:
                                count = _encode_back(chain, scratch, q, count)
                                pending_head += 1
                                continue
                        break
                    events[count, 0], events[count, 1] = BACKWARD, m
                    count += 1
                free[p] = max(free[p], arrival) + chain.backward[m, p]
                backward_end[back, p] = free[p]
                used[p] -= chain.activation[m, p]
                if p == 0 and chain.trained:
                    for q in range(chain.part_start[m + 1] - 1, chain.part_start[m] - 1, -1):
                        if settings[LATE]:
                            pending[pending_tail] = q
                            pending_tail += 1
                        else:
                            count = _encode_back(chain, scratch, q, count)
                left[p] -= chain.backward[m, p]
            if i < num_microbatches:
                m = order[i]
                if p == 0:
                    # Run parts that have not run early. If memory is short, run delayed backwards first.
                    if at < i:
                        at = i
                        part = chain.part_start[m]
                    while at == i and part < chain.part_start[m + 1]:
                        while (
                            used[0] + chain.part_bytes[part] + chain.part_output[part] > chain.capacity[0]
                            and pending_head < pending_tail
                        ):
                            count = _encode_back(chain, scratch, pending[pending_head], count)
                            pending_head += 1
                        count = _encode(chain, scratch, part, count)
                        part += 1
                    while used[0] + chain.activation[m, 0] > chain.capacity[0] and pending_head < pending_tail:
                        count = _encode_back(chain, scratch, pending[pending_head], count)
                        pending_head += 1
                    events[count, 0], events[count, 1] = FORWARD, m
                    count += 1
                    free[0] += chain.forward[m, 0]
                    used[0] += chain.activation[m, 0]
                    for q in range(chain.part_start[m], chain.part_start[m + 1]):
                        used[0] -= chain.part_output[q]
                else:
                    free[p] = max(free[p], forward_end[i, p - 1] + chain.delay[m, p - 1]) + chain.forward[m, p]
                    used[p] += chain.activation[m, p]
                    if used[p] > chain.capacity[p]:
                        return INFEASIBLE, 0
                forward_end[i, p] = free[p]
                left[p] -= chain.forward[m, p]
                if free[p] + left[p] >= ceiling:
                    return ceiling, 0
    while pending_head < pending_tail:
        count = _encode_back(chain, scratch, pending[pending_head], count)
        pending_head += 1
    makespan = 0
    for p in range(num_ranks):
        makespan = max(makespan, free[p])
    return makespan, count


@kernel
def best_of(chain: Chain, orders: Array, settings: Array, scratch: Scratch, ceiling: int) -> tuple[int, int, int]:
    """Run every order with every row of settings; return the best makespan, order and settings.

    If no makespan is below ``ceiling``, return ``ceiling`` and -1 twice.
    """
    best = ceiling
    best_order = -1
    best_settings = -1
    for i in range(len(orders)):
        for j in range(len(settings)):
            makespan, _ = run(chain, orders[i], settings[j], scratch, best)
            if makespan != INFEASIBLE and makespan < best:
                best, best_order, best_settings = makespan, i, j
    return best, best_order, best_settings
