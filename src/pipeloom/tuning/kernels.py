"""Compiled loops of tuning: one 1F1B iteration with encoders on the first rank by recurrence, and search over orders.

A microbatch passes the backbone's ranks forward and back; before its forward on rank 0 its encoder parts run there, and
where the encoders are trained, their backwards after its backward there. 1F1B fixes every rank's order but for the
encoder parts, so one pass over the microbatches gives all times: when rank 0 comes to a backward, the time at which its
gradient arrives is known already, and with it the idle time before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import kernel

Array = npt.NDArray[Any]

INFEASIBLE = -1
WINDOW = 32
"""Microbatches ahead at most whose encoder parts run early."""
ENCODE, FORWARD, BACKWARD, ENCODE_BACK = 0, 1, 2, 3
"""What an event of rank 0 is."""
EXTRA, OVERRUN, EARLY, LATE = 0, 1, 2, 3
"""Entries of ``settings``: forwards ahead beyond 1F1B's; share of an encoder part, in per cent, by which it may run
over an idle time; whether encoder forwards run early; whether encoder backwards wait for idle time."""
NUM_SETTINGS = 4
MOST_EXTRA = 2


@kernel
def interpolate(
    nodes: Array, mean_length: Array, values: Array, per_instance: Array, instances: Array, tokens: Array, pairs: Array,
    out: Array,
) -> None:  # fmt: skip
    """Read a `pipeloom.tuning.CostTable` at many workloads; linear within its grid and beyond its ends."""
    num_nodes, num_lengths = mean_length.shape
    for w in range(len(tokens)):
        if tokens[w] <= 0:
            continue
        low = 0
        high = num_nodes - 1
        while high - low > 1:
            middle = (low + high) // 2
            if nodes[middle] <= tokens[w]:
                low = middle
            else:
                high = middle
        length = pairs[w] / tokens[w]
        share = (tokens[w] - nodes[low]) / (nodes[low + 1] - nodes[low])
        for side in range(2):
            node = low + side
            column = 0
            while column < num_lengths - 2 and mean_length[node, column + 1] < length:
                column += 1
            left = mean_length[node, column]
            along = (length - left) / (mean_length[node, column + 1] - left)
            weight = share if side == 1 else 1 - share
            for row in range(values.shape[0]):
                first = values[row, node, column]
                out[row, w] += weight * (first + along * (values[row, node, column + 1] - first))
        for row in range(values.shape[0]):
            out[row, w] = max(0.0, out[row, w] + per_instance[row] * instances[w])


class Chain(NamedTuple):
    """Costs of one packed batch: times in ns, sizes in bytes.

    Attributes
    ----------
    forward, backward, activation : array, shape (num_microbatches, num_ranks)
    delay : array, shape (num_microbatches, num_ranks)
        Seconds of the message between rank p and p + 1, the same forward and back; the last column is 0.
    part_start : array, shape (num_microbatches + 1,)
        Encoder parts of microbatch m are ``part_start[m]`` to ``part_start[m + 1]``.
    part_forward, part_backward, part_bytes, part_output : array, shape (num_parts,)
        ``part_bytes`` are activations: until the end of the part's backward, or of its forward where it is frozen.
        ``part_output`` are the embeddings, held until the backbone's forward has read them.
    static, capacity : array, shape (num_ranks,)
    trained : bool
        Whether encoder parts have backwards.
    """

    forward: Array
    backward: Array
    activation: Array
    delay: Array
    part_start: Array
    part_forward: Array
    part_backward: Array
    part_bytes: Array
    part_output: Array
    static: Array
    capacity: Array
    trained: bool


class Scratch(NamedTuple):
    """Arrays that a run writes: ends of forwards and backwards, rank 0's events, and the memory that it needs."""

    forward_end: Array
    backward_end: Array
    free: Array
    left: Array
    used: Array
    events: Array
    pending: Array
    needs: Array


def make_scratch(chain: Chain) -> Scratch:
    """Room for runs of chains of this size."""
    m, p = chain.forward.shape
    parts = len(chain.part_forward)
    return Scratch(
        np.zeros((m, p), np.int64), np.zeros((m, p), np.int64), np.zeros(p, np.int64), np.zeros(p, np.int64),
        np.zeros(p, np.int64),
        np.zeros((2 * m + 2 * parts + 1, 2), np.int64), np.zeros(parts + 1, np.int64), np.zeros(m + 1, np.int64),
    )  # fmt: skip


@kernel
def _needs(chain: Chain, order: Array, ahead: int, needs: Array) -> bool:
    """Write rank 0's memory at the turn of every microbatch, were nothing run early or late; whether it fits."""
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
            own += chain.part_output[q]
            if chain.trained:
                own += chain.part_bytes[q]
                most = max(most, own)
        needs[n] = held + max(most, own + chain.activation[m, 0])
        if needs[n] > chain.capacity[0]:
            return False
        held += chain.activation[m, 0]
        if chain.trained:
            for q in range(chain.part_start[m], chain.part_start[m + 1]):
                held += chain.part_bytes[q]
    return True


@kernel
def _held(chain: Chain, part: int) -> int:
    """Bytes that an encoder part leaves behind until its microbatch's turn."""
    return int(chain.part_output[part] + (chain.part_bytes[part] if chain.trained else 0))


@kernel
def _fits_early(chain: Chain, order: Array, needs: Array, turn: int, at: int, part: int, used: int) -> bool:
    """Whether a part of the microbatch at position ``at`` may run when rank 0 is at position ``turn``.

    ``part`` is the next one to run: all before it, in order, have run.
    """
    if used + chain.part_bytes[part] + chain.part_output[part] > chain.capacity[0]:
        return False
    early = _held(chain, part)
    for q in range(chain.part_start[order[at]], part):
        early += _held(chain, q)
    for n in range(at - 1, turn - 1, -1):
        if needs[n] + early > chain.capacity[0]:
            return False
        for q in range(chain.part_start[order[n]], chain.part_start[order[n] + 1]):
            early += _held(chain, q)
    return True


@kernel
def run(chain: Chain, order: Array, settings: Array, scratch: Scratch, ceiling: int) -> tuple[int, int]:
    """Makespan of an order of microbatches, or `INFEASIBLE`; and how many events rank 0 has.

    Gives up, with ``ceiling``, as soon as the makespan cannot be below it. Events are (kind, microbatch or part).
    """
    num_microbatches, num_ranks = chain.forward.shape
    forward_end, backward_end = scratch.forward_end, scratch.backward_end
    free, used, events, pending, needs = (
        scratch.free,
        scratch.used,
        scratch.events,
        scratch.pending,
        scratch.needs,
    )
    extra = settings[EXTRA]
    if not _needs(chain, order, num_ranks - 1 + extra, needs):
        return INFEASIBLE, 0
    last = num_ranks - 1
    # Work that a rank has left, and the last microbatch's way home from there.
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
                    # Idle time before a backward of rank 0, whose end nobody else waits for.
                    while free[0] < arrival:
                        while at < num_microbatches and part == chain.part_start[order[at] + 1]:
                            at += 1
                            if at < num_microbatches:
                                part = chain.part_start[order[at]]
                        if settings[EARLY] and at < num_microbatches and at <= i + WINDOW:
                            over = free[0] + chain.part_forward[part] - arrival
                            within = over * 100 <= settings[OVERRUN] * chain.part_forward[part]
                            if (at == i or within) and _fits_early(chain, order, needs, i, at, part, used[0]):
                                free[0] += chain.part_forward[part]
                                used[0] += _held(chain, part)
                                events[count, 0], events[count, 1] = ENCODE, part
                                count += 1
                                part += 1
                                continue
                        if pending_head < pending_tail:
                            q = pending[pending_head]
                            over = free[0] + chain.part_backward[q] - arrival
                            if (
                                i >= num_microbatches
                                or over * 100 <= settings[OVERRUN] * chain.part_backward[q]
                            ):
                                free[0] += chain.part_backward[q]
                                used[0] -= chain.part_bytes[q]
                                events[count, 0], events[count, 1] = ENCODE_BACK, q
                                count += 1
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
                            free[0] += chain.part_backward[q]
                            used[0] -= chain.part_bytes[q]
                            events[count, 0], events[count, 1] = ENCODE_BACK, q
                            count += 1
                left[p] -= chain.backward[m, p]
            if i < num_microbatches:
                m = order[i]
                if p == 0:
                    # What has not run early runs now; backwards that wait make room where it is needed.
                    if at < i:
                        at = i
                        part = chain.part_start[m]
                    while at == i and part < chain.part_start[m + 1]:
                        while (
                            used[0] + chain.part_bytes[part] + chain.part_output[part] > chain.capacity[0]
                            and pending_head < pending_tail
                        ):
                            q = pending[pending_head]
                            free[0] += chain.part_backward[q]
                            used[0] -= chain.part_bytes[q]
                            events[count, 0], events[count, 1] = ENCODE_BACK, q
                            count += 1
                            pending_head += 1
                        free[0] += chain.part_forward[part]
                        used[0] += _held(chain, part)
                        events[count, 0], events[count, 1] = ENCODE, part
                        count += 1
                        part += 1
                    while (
                        used[0] + chain.activation[m, 0] > chain.capacity[0] and pending_head < pending_tail
                    ):
                        q = pending[pending_head]
                        free[0] += chain.part_backward[q]
                        used[0] -= chain.part_bytes[q]
                        events[count, 0], events[count, 1] = ENCODE_BACK, q
                        count += 1
                        pending_head += 1
                    events[count, 0], events[count, 1] = FORWARD, m
                    count += 1
                    free[0] += chain.forward[m, 0]
                    used[0] += chain.activation[m, 0]
                    for q in range(chain.part_start[m], chain.part_start[m + 1]):
                        used[0] -= chain.part_output[q]
                else:
                    free[p] = (
                        max(free[p], forward_end[i, p - 1] + chain.delay[m, p - 1]) + chain.forward[m, p]
                    )
                    used[p] += chain.activation[m, p]
                    if used[p] > chain.capacity[p]:
                        return INFEASIBLE, 0
                forward_end[i, p] = free[p]
                left[p] -= chain.forward[m, p]
                if free[p] + left[p] >= ceiling:
                    return ceiling, 0
    while pending_head < pending_tail:
        q = pending[pending_head]
        free[0] += chain.part_backward[q]
        events[count, 0], events[count, 1] = ENCODE_BACK, q
        count += 1
        pending_head += 1
    makespan = 0
    for p in range(num_ranks):
        makespan = max(makespan, free[p])
    return makespan, count


@kernel
def best_of(
    chain: Chain, orders: Array, settings: Array, scratch: Scratch, ceiling: int
) -> tuple[int, int, int]:
    """Run every order with every row of settings: (makespan, order, settings) of the best, -1s where none is below."""
    best = ceiling
    best_order = -1
    best_settings = -1
    for i in range(len(orders)):
        for j in range(len(settings)):
            makespan, _ = run(chain, orders[i], settings[j], scratch, best)
            if makespan != INFEASIBLE and makespan < best:
                best, best_order, best_settings = makespan, i, j
    return best, best_order, best_settings


class Marginal(NamedTuple):
    """What one sample adds to a microbatch of the usual size: the fields of `Chain`, shape (num_samples, ...)."""

    tokens: Array
    forward: Array
    backward: Array
    activation: Array
    delay: Array
    part_forward: Array
    part_backward: Array
    part_bytes: Array
    part_output: Array


@kernel
def _draw(state: Array, below: int) -> int:
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return np.int64((x >> np.uint64(33)) % np.uint64(below))  # type: ignore[return-value]


@kernel
def _place(state: Array, num_microbatches: int, ends: int) -> int:
    """A place in the order; beginning and end decide most, so half of the draws are from there."""
    if _draw(state, 2) == 0:
        return _draw(state, num_microbatches)
    near = _draw(state, ends)
    return near if _draw(state, 2) == 0 else num_microbatches - 1 - near


@kernel
def _add(chain: Chain, m: int, marginal: Marginal, sample: int, sign: int) -> None:
    """Put a sample into a microbatch, or (-1) take it out."""
    for p in range(chain.forward.shape[1]):
        chain.forward[m, p] += sign * marginal.forward[sample, p]
        chain.backward[m, p] += sign * marginal.backward[sample, p]
        chain.activation[m, p] += sign * marginal.activation[sample, p]
        chain.delay[m, p] += sign * marginal.delay[sample, p]
    num_parts = chain.part_start[m + 1] - chain.part_start[m]
    for q in range(chain.part_start[m], chain.part_start[m + 1]):
        chain.part_forward[q] += sign * (marginal.part_forward[sample] // num_parts)
        chain.part_backward[q] += sign * (marginal.part_backward[sample] // num_parts)
        chain.part_bytes[q] += sign * (marginal.part_bytes[sample] // num_parts)
        chain.part_output[q] += sign * (marginal.part_output[sample] // num_parts)


@kernel
def _movable(chain: Chain, m: int, marginal: Marginal, sample: int) -> bool:
    """Images go only where there are images already: elsewhere there is no encoder part to put them into."""
    return bool(marginal.part_forward[sample] == 0 or chain.part_start[m + 1] > chain.part_start[m])


@kernel
def climb(
    chain: Chain, order: Array, settings: Array, bin_of: Array, marginal: Marginal, budget: int, scratch: Scratch,
    evaluations: int, seed: int, tune_samples: bool, tune_early: bool, tune_late: bool, best: int, goal: int,
) -> tuple[int, int]:  # fmt: skip
    """Local search on order, settings and samples at once, in place: changes that make nothing slower.

    Costs in ``chain`` follow the samples by ``marginal``, so they are estimates once samples have moved. Returns the
    makespan and the number of runs.
    """
    num_microbatches = len(order)
    num_samples = len(bin_of)
    ends = min(num_microbatches, chain.forward.shape[1])
    state = np.full(1, np.uint64(seed) * np.uint64(2) + np.uint64(0x9E3779B97F4A7C15), np.uint64)
    used = np.zeros(num_microbatches, np.int64)
    count = np.zeros(num_microbatches, np.int64)
    for i in range(num_samples):
        used[bin_of[i]] += marginal.tokens[i]
        count[bin_of[i]] += 1
    spare = order.copy()
    changed = settings.copy()
    done = 0
    while done < evaluations and best > goal:
        spare[:] = order
        changed[:] = settings
        out, come, source, target = -1, -1, 0, 0
        kind = _draw(state, 12)
        if kind < 7 and tune_samples and num_microbatches > 1:
            # A sample moves to another microbatch, or two change places.
            out = _draw(state, num_samples)
            source = bin_of[out]
            target = order[_place(state, num_microbatches, ends)]
            if kind >= 3:
                come = _draw(state, num_samples)
                target = bin_of[come]
            if source == target or (come < 0 and count[source] == 1):
                continue
            gain = marginal.tokens[out] - (marginal.tokens[come] if come >= 0 else 0)
            if used[target] + gain > budget or used[source] - gain > budget:
                continue
            if not _movable(chain, target, marginal, out):
                continue
            if come >= 0 and not _movable(chain, source, marginal, come):
                continue
            _add(chain, source, marginal, out, -1)
            _add(chain, target, marginal, out, 1)
            if come >= 0:
                _add(chain, target, marginal, come, -1)
                _add(chain, source, marginal, come, 1)
        elif kind < 10 and num_microbatches > 1:
            a = _place(state, num_microbatches, ends)
            b = _draw(state, num_microbatches)
            if a == b:
                continue
            if kind == 9:
                spare[a], spare[b] = order[b], order[a]
            else:
                moved = order[a]
                step = 1 if b > a else -1
                k = a
                while k != b:
                    spare[k] = order[k + step]
                    k += step
                spare[b] = moved
        elif kind == 10:
            changed[EXTRA] = _draw(state, MOST_EXTRA + 1)
        elif tune_early:
            changed[OVERRUN] = 25 * _draw(state, 5)
            if tune_late and chain.trained:
                changed[LATE] = _draw(state, 2)
        # Equal answers are taken too, so that search walks along plateaus.
        makespan, _ = run(chain, spare, changed, scratch, best + 1)
        done += 1
        if makespan != INFEASIBLE and makespan <= best:
            best = makespan
            order[:] = spare
            settings[:] = changed
            if out >= 0:
                bin_of[out] = target
                used[target] += gain
                used[source] -= gain
                if come >= 0:
                    bin_of[come] = source
                else:
                    count[source] -= 1
                    count[target] += 1
        elif out >= 0:
            _add(chain, source, marginal, out, 1)
            _add(chain, target, marginal, out, -1)
            if come >= 0:
                _add(chain, target, marginal, come, 1)
                _add(chain, source, marginal, come, -1)
    return best, done


def warm_up() -> None:
    """Compile all loops for the array types that tuning uses."""
    cost, parts, one = np.ones((2, 1), np.int64), np.ones(2, np.int64), np.ones(1, np.int64)
    chain = Chain(cost, cost.copy(), cost.copy(), cost * 0, np.arange(3), parts, parts.copy(), parts.copy(),
                  parts.copy(), one, one * 99, True)  # fmt: skip
    marginal = Marginal(parts, cost, cost, cost, cost, parts, parts, parts, parts)
    scratch = make_scratch(chain)
    order, settings = np.arange(2), np.zeros(NUM_SETTINGS, np.int64)
    run(chain, order, settings, scratch, 99)
    best_of(chain, order[None].copy(), settings[None].copy(), scratch, 99)
    climb(chain, order, settings, np.arange(2), marginal, 9, scratch, 1, 0, True, True, True, 99, 0)
    grid, numbers = np.array([[1.0, 2.0], [1.0, 2.0]]), np.ones(1)
    interpolate(
        np.array([1.0, 2.0]), grid, np.ones((4, 2, 2)), np.ones(4), numbers, numbers, numbers, np.ones((4, 1))
    )
