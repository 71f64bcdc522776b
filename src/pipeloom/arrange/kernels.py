"""Compiled loops of the joint search: run an arrangement under a rule, change it, anneal it.

A *candidate* is one array ``plan`` of shape (NUM_ROWS, most chunks + 1); rows are named below. What the rule means:
``docs/arrange.md``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import kernel

Array = npt.NDArray[Any]

FIRST, RANK, KEY, WAIT, SCALARS, NUM_ROWS = 0, 1, 2, 5, 8, 9
"""Rows of a plan: first layer and rank of every chunk, three rows of keys (F, B or I, W), three of waiting
tolerances, and scalars: number of chunks, and how many microbatches take turns."""
NUM_CHUNKS, PERIOD = 0, 1
NEVER = 2**62
NUM_MOVES = 17
_TRIES = 40


@kernel
def run(
    num_chunks: int,
    num_microbatches: int,
    rank: Array,
    duration: Array,
    split: Array,
    held: Array,
    slack: Array,
    hop: Array,
    tail: Array,
    key: Array,
    wait: Array,
    period: int,
    stride: int,
    cutoff: int,
    end: Array,
    done: Array,
    ready: Array,
    now_key: Array,
    row: Array,
    listed: Array,
    free: Array,
    wake: Array,
    left: Array,
    admitted: Array,
    record: Array,
) -> int:
    """Run all microbatches greedily; return the makespan, or `NEVER` once it cannot be below ``cutoff``.

    Of all ranks the one that could start first does, and takes of its ready and admitted tasks the one with the
    least key. Instead it waits where a task with a lesser key is certain to be ready within that task's tolerance.

    Parameters
    ----------
    rank, split, hop : array, shape (num_chunks,)
        ``split``: the chunk has a W. ``hop[c]``: delay between chunk c and the next.
    duration, key, wait : array, shape (3, num_chunks)
        Rows F, B or I, W.
    held : array, shape (2, num_chunks)
        Bytes from F to B or I, and from I to W; the first not less than the second.
    slack : array, shape (num_ranks,)
        Capacity less static bytes. A rank must have room for one microbatch of each of its chunks.
    tail : array, shape (num_ranks,)
        Least time after the last task of a rank.
    period, stride : int
        Microbatch m adds ``m // period * period * stride`` to its keys.
    end : array, shape (2, num_chunks * num_microbatches)
    record : array
        Where as long as there are tasks, gets (kind, chunk, microbatch) codes in order of dispatch; else untouched.
    The others are scratch: done, ready, now_key (3, chunks), row (ranks + 1), listed (chunks), free, wake, left
    (ranks), admitted (chunks).

    Notes
    -----
    Admission: for every chunk j of the rank, what chunks up to j hold, and one microbatch of each later chunk, must
    fit. The oldest microbatch in flight is then always admitted to its next chunk, once weight gradients have run,
    so the rule never deadlocks (``docs/arrange.md``).
    """
    num_ranks = len(slack)
    last = num_chunks - 1
    group = period * stride
    count: Any = np.int64(0)
    for r in range(num_ranks + 1):
        row[r] = 0
    for c in range(num_chunks):
        row[rank[c] + 1] += 1
    for r in range(num_ranks):
        row[r + 1] += row[r]
        free[r] = row[r]
        left[r] = 0
    for c in range(num_chunks):
        listed[free[rank[c]]] = c
        free[rank[c]] += 1
        left[rank[c]] += (duration[0, c] + duration[1, c] + duration[2, c]) * num_microbatches
        count += 3 if split[c] else 2
        admitted[c] = 1
        for k in range(3):
            done[k, c] = 0
            ready[k, c] = NEVER
            now_key[k, c] = key[k, c]
    ready[0, 0] = 0
    patient = False
    for c in range(num_chunks):
        for k in range(3):
            if wait[k, c] > 0:
                patient = True
    for r in range(num_ranks):
        need = np.int64(0)
        for i in range(row[r], row[r + 1]):
            c = listed[i]
            need += held[0, c]
        if need > slack[r]:
            return NEVER
        free[r] = 0
        wake[r] = NEVER
    wake[rank[0]] = 0
    count *= num_microbatches
    writes = len(record) >= count
    makespan: Any = np.int64(0)
    for step in range(count):
        r = 0
        t = wake[0]
        for q in range(1, num_ranks):
            if wake[q] < t:
                t = wake[q]
                r = q
        if t >= NEVER:
            return NEVER
        waiting = True
        chunk = -1
        kind = 0
        while waiting:
            waiting = False
            best: Any = np.int64(NEVER)
            chunk = -1
            for i in range(row[r], row[r + 1]):
                c = listed[i]
                if ready[1, c] <= t and now_key[1, c] < best:
                    best = now_key[1, c]
                    chunk = c
                    kind = 1
                if ready[0, c] <= t and admitted[c] == 1 and now_key[0, c] < best:
                    best = now_key[0, c]
                    chunk = c
                    kind = 0
                if split[c] and ready[2, c] <= t and now_key[2, c] < best:
                    best = now_key[2, c]
                    chunk = c
                    kind = 2
            if patient:
                soonest = np.int64(NEVER)
                for i in range(row[r], row[r + 1]):
                    c = listed[i]
                    for k in range(2):
                        if ready[k, c] > t and (k == 1 or admitted[c] == 1):
                            soonest = min(soonest, ready[k, c])
                            if now_key[k, c] < best and ready[k, c] - t <= wait[k, c]:
                                waiting = True
                if waiting:
                    # Others may be due before: the rank that is first then decides.
                    wake[r] = soonest
                    r = 0
                    t = wake[0]
                    for q in range(1, num_ranks):
                        if wake[q] < t:
                            t = wake[q]
                            r = q
        if t + left[r] + tail[r] >= cutoff:
            return NEVER
        m = done[kind, chunk]
        finish = t + duration[kind, chunk]
        left[r] -= duration[kind, chunk]
        free[r] = finish
        makespan = max(makespan, finish)
        if writes:
            record[step] = (kind * num_chunks + chunk) * num_microbatches + m
        # The next microbatch of this task.
        done[kind, chunk] = m + 1
        if (m + 1) % period == 0:
            now_key[kind, chunk] += group
        ready[kind, chunk] = NEVER
        other = -1
        at = np.int64(0)
        if kind == 0:
            end[0, chunk * num_microbatches + m] = finish
            if m + 1 < num_microbatches:
                if chunk == 0:
                    ready[0, 0] = 0
                elif done[0, chunk - 1] > m + 1:
                    ready[0, chunk] = end[0, (chunk - 1) * num_microbatches + m + 1] + hop[chunk - 1]
            if chunk < last:
                if done[0, chunk + 1] == m:
                    other = chunk + 1
                    at = finish + hop[chunk]
                    ready[0, other] = at
            elif done[1, last] == m:
                ready[1, last] = finish
        elif kind == 1:
            end[1, chunk * num_microbatches + m] = finish
            if m + 1 < num_microbatches:
                if chunk == last:
                    if done[0, last] > m + 1:
                        ready[1, last] = end[0, last * num_microbatches + m + 1]
                elif done[1, chunk + 1] > m + 1:
                    ready[1, chunk] = end[1, (chunk + 1) * num_microbatches + m + 1] + hop[chunk]
            if chunk > 0 and done[1, chunk - 1] == m:
                other = chunk - 1
                at = finish + hop[other]
                ready[1, other] = at
            if split[chunk] and done[2, chunk] == m:
                ready[2, chunk] = finish
        elif done[1, chunk] > m + 1:
            ready[2, chunk] = end[1, chunk * num_microbatches + m + 1]
        # Admission on this rank, from its last chunk to its first.
        use = np.int64(0)
        later = np.int64(0)
        for i in range(row[r], row[r + 1]):
            c = listed[i]
            use += (done[0, c] - done[1, c]) * held[0, c]
            if split[c]:
                use += (done[1, c] - done[2, c]) * held[1, c]
        room = np.int64(NEVER)
        soonest = np.int64(NEVER)
        for i in range(row[r + 1] - 1, row[r] - 1, -1):
            c = listed[i]
            room = min(room, slack[r] - use - later)
            need = held[0, c]
            admitted[c] = 1 if need <= room else 0
            if admitted[c] == 1:
                soonest = min(soonest, ready[0, c])
            soonest = min(soonest, ready[1, c])
            use -= (done[0, c] - done[1, c]) * held[0, c]
            if split[c]:
                use -= (done[1, c] - done[2, c]) * held[1, c]
                soonest = min(soonest, ready[2, c])
            later += need
        wake[r] = max(finish, soonest)
        if other >= 0:
            q = rank[other]
            if q != r and (kind == 1 or admitted[other] == 1):
                wake[q] = min(wake[q], max(free[q], at))
    return int(makespan)


@kernel
def rand(state: Array) -> Any:
    """Next of a xorshift64* sequence, as 31 bits."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    drawn: Any = np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(33))
    return drawn


@kernel
def uniform(state: Array) -> Any:
    """Next of the sequence in (0, 1)."""
    return (rand(state) + 0.5) / 2147483648.0


@kernel
def evaluate(
    plan: Array, layers: Array, strategy: Array, statics: Array, room: Array, num_microbatches: int, delay: int,
    stride: int, cutoff: int, ints: Array, end: Array, record: Array,
) -> int:  # fmt: skip
    """Sum layers to chunks, reject what load + head + tail rule out, and run the rest.

    ``layers`` has shape (5, num_layers, num_strategies): ns of F, B or I, and W; bytes to B and to W. ``ints`` is
    scratch of shape (32, at least most chunks + 1 and ranks + 1).
    """
    num = plan[SCALARS, NUM_CHUNKS]
    num_ranks = len(room)
    rank = plan[RANK]
    duration = ints[0:3]
    held = ints[3:5]
    split = ints[5]
    hop = ints[6]
    slack = ints[7][:num_ranks]
    tail = ints[8]
    load = ints[9]
    head = ints[10]
    for r in range(num_ranks):
        slack[r] = room[r]
        load[r] = 0
        head[r] = -1
        tail[r] = 0
    before = np.int64(0)
    after = np.int64(0)
    for c in range(num):
        for k in range(5):
            ints[k, c] = 0
        split[c] = 0
        r = rank[c]
        for layer in range(plan[FIRST, c], plan[FIRST, c + 1]):
            s = strategy[layer]
            for k in range(3):
                duration[k, c] += layers[k, layer, s]
            held[0, c] += layers[3, layer, s]
            held[1, c] += layers[4, layer, s]
            if layers[2, layer, 0] > 0 or layers[2, layer, s] > 0:
                split[c] = 1
            slack[r] -= statics[layer]
        if head[r] < 0:
            head[r] = before
            tail[r] = after
        if split[c] == 1:
            tail[r] = -1
            # What grows when I ends is taken from the start, or a backward might not fit.
            held[0, c] = max(held[0, c], held[1, c])
        load[r] += duration[0, c] + duration[1, c] + duration[2, c]
        before += duration[0, c]
        after += duration[1, c]
        hop[c] = 0
        if c + 1 < num and rank[c + 1] != r:
            hop[c] = delay
            before += delay
            after += delay
    for r in range(num_ranks):
        tail[r] = max(tail[r], 0)
        if head[r] >= 0 and load[r] * num_microbatches + head[r] + tail[r] >= cutoff:
            return NEVER
    return run(
        num, num_microbatches, rank, duration, split, held, slack, hop, tail, plan[KEY : KEY + 3],
        plan[WAIT : WAIT + 3], plan[SCALARS, PERIOD], stride, cutoff, end, ints[11:14], ints[14:17], ints[17:20],
        ints[20], ints[21], ints[22], ints[23], ints[24], ints[25], record,
    )  # fmt: skip


@kernel
def split_chunk(plan: Array, c: int, at: int, rank: int) -> None:
    """Cut chunk ``c`` before layer ``at``; the second part goes to ``rank``, and stands beside in all orders."""
    num = plan[SCALARS, NUM_CHUNKS]
    for k in range(FIRST, SCALARS):
        for i in range(num, c, -1):
            plan[k, i + 1] = plan[k, i]
        plan[k, c + 1] = plan[k, c]
    plan[FIRST, c + 1] = at
    plan[RANK, c + 1] = rank
    plan[SCALARS, NUM_CHUNKS] = num + 1


@kernel
def merge_chunk(plan: Array, c: int) -> None:
    """Join chunk ``c + 1`` to chunk ``c``."""
    num = plan[SCALARS, NUM_CHUNKS]
    for k in range(FIRST, SCALARS):
        for i in range(c + 1, num):
            plan[k, i] = plan[k, i + 1]
    plan[SCALARS, NUM_CHUNKS] = num - 1


@kernel
def ends_bound(plan: Array, sums: Array, load: Array, ends: Array, num_microbatches: int, delay: int) -> Any:
    """Largest load + head + tail of all ranks; ``sums`` (3, layers + 1) are F, B that make tails, and all work."""
    for r in range(len(load)):
        load[r] = 0
        ends[r] = -1
    hops = np.int64(0)
    for c in range(plan[SCALARS, NUM_CHUNKS]):
        r = plan[RANK, c]
        first = plan[FIRST, c]
        if c > 0 and plan[RANK, c - 1] != r:
            hops += delay
        load[r] += sums[2, plan[FIRST, c + 1]] - sums[2, first]
        if ends[r] < 0:
            ends[r] = sums[0, first] + sums[1, first] + hops
    worst = np.int64(0)
    for r in range(len(load)):
        worst = max(worst, load[r] * num_microbatches + ends[r])
    return worst


@kernel
def rebalance(
    plan: Array, strategy: Array, layers: Array, num_ranks: int, num_microbatches: int, delay: int, ranks_too: bool,
    rng: Array,
) -> bool:  # fmt: skip
    """Move a few boundaries (and ranks) so that the rank with the most to do has less; say whether that was found."""
    num = plan[SCALARS, NUM_CHUNKS]
    if num < 2:
        return False
    num_layers = len(strategy)
    sums = np.zeros((3, num_layers + 1), np.int64)
    fillable = False
    for layer in range(num_layers):
        s = strategy[layer]
        sums[0, layer + 1] = sums[0, layer] + layers[0, layer, s]
        sums[1, layer + 1] = sums[1, layer] + layers[1, layer, s]
        sums[2, layer + 1] = sums[2, layer] + layers[0, layer, s] + layers[1, layer, s] + layers[2, layer, s]
        fillable = fillable or layers[2, layer, s] > 0
    if fillable:
        sums[1, :] = 0
    load = np.zeros(num_ranks, np.int64)
    ends = np.zeros(num_ranks, np.int64)
    now = ends_bound(plan, sums, load, ends, num_microbatches, delay)
    saved = plan[:KEY].copy()
    for _ in range(_TRIES):
        for _change in range(1 + rand(rng) % 4):
            if ranks_too and rand(rng) % 3 == 0:
                c = rand(rng) % num
                o = rand(rng) % num
                if rand(rng) % 2:
                    plan[RANK, c], plan[RANK, o] = plan[RANK, o], plan[RANK, c]
                else:
                    plan[RANK, c] = rand(rng) % num_ranks
            else:
                c = 1 + rand(rng) % (num - 1)
                at = plan[FIRST, c] + (1 if rand(rng) % 2 else -1)
                if plan[FIRST, c - 1] < at < plan[FIRST, c + 1]:
                    plan[FIRST, c] = at
        if ends_bound(plan, sums, load, ends, num_microbatches, delay) < now:
            return True
        plan[:KEY] = saved
    return False


@kernel
def change(
    plan: Array, strategy: Array, num_strategies: Array, layers: Array, num_ranks: int, most_chunks: int,
    num_microbatches: int, delay: int, stride: int, weights: Array, rng: Array,
) -> int:  # fmt: skip
    """Make one random change of a plan in place; return its number, or -1 where it changed nothing."""
    num = plan[SCALARS, NUM_CHUNKS]
    pick = uniform(rng) * weights[NUM_MOVES - 1]
    move = 0
    while weights[move] <= pick:
        move += 1
    c = rand(rng) % num
    if move == 0:  # how many microbatches take turns
        plan[SCALARS, PERIOD] = 1 + rand(rng) % min(num_microbatches, 3 * num_ranks)
    elif move == 1:  # cut a chunk in two
        size = plan[FIRST, c + 1] - plan[FIRST, c]
        if size < 2 or num >= most_chunks:
            return -1
        new = rand(rng) % num_ranks
        at = plan[FIRST, c] + 1 + rand(rng) % (size - 1)
        split_chunk(plan, c, at, plan[RANK, c])
        plan[RANK, c + rand(rng) % 2] = new
    elif move == 2:  # two chunks exchange ranks
        o = rand(rng) % num
        if plan[RANK, c] == plan[RANK, o]:
            return -1
        plan[RANK, c], plan[RANK, o] = plan[RANK, o], plan[RANK, c]
    elif move == 3:  # permute the ranks of consecutive chunks
        size = min(2 + rand(rng) % num_ranks, num)
        c = rand(rng) % (num - size + 1)
        for i in range(size - 1, 0, -1):
            j = rand(rng) % (i + 1)
            plan[RANK, c + i], plan[RANK, c + j] = plan[RANK, c + j], plan[RANK, c + i]
    elif move == 4 or move == 5:  # shift the key of one task, or of one task in all chunks
        kind = rand(rng) % 3
        scale = stride >> (rand(rng) % 7)
        shift = np.int64((uniform(rng) - 0.5) * 4.0 * scale)
        if move == 4:
            plan[KEY + kind, c] += shift
        else:
            o = rand(rng) % num
            for i in range(min(c, o), max(c, o) + 1):
                plan[KEY + kind, i] += shift
    elif move == 6:  # waiting
        kind = rand(rng) % 2
        plan[WAIT + kind, c] = 0 if rand(rng) % 2 else np.int64(uniform(rng) * uniform(rng) * stride)
    elif move == 7:  # move a boundary
        if num < 2:
            return -1
        c = 1 + rand(rng) % (num - 1)
        by = 1 + rand(rng) % 3
        by = by if rand(rng) % 2 else -by
        at = plan[FIRST, c] + by
        if at <= plan[FIRST, c - 1] or at >= plan[FIRST, c + 1]:
            return -1
        plan[FIRST, c] = at
    elif move == 8:  # relabel the ranks of a suffix
        a = rand(rng) % num_ranks
        b = rand(rng) % num_ranks
        if a == b:
            return -1
        for i in range(c, num):
            if plan[RANK, i] == a:
                plan[RANK, i] = b
            elif plan[RANK, i] == b:
                plan[RANK, i] = a
    elif move == 9:  # join two chunks
        if num < 2 or c + 1 >= num:
            return -1
        if rand(rng) % 2:
            plan[RANK, c] = plan[RANK, c + 1]
        merge_chunk(plan, c)
    elif move == 10:  # a chunk to another rank
        plan[RANK, c] = rand(rng) % num_ranks
    elif move == 11:  # two boundaries at once, so that loads may be exchanged
        if num < 3:
            return -1
        for _side in range(2):
            c = 1 + rand(rng) % (num - 1)
            by = 1 if rand(rng) % 2 else -1
            at = plan[FIRST, c] + by
            if at <= plan[FIRST, c - 1] or at >= plan[FIRST, c + 1]:
                return -1
            plan[FIRST, c] = at
    elif move == 12:  # cut at one place and join at another
        size = plan[FIRST, c + 1] - plan[FIRST, c]
        if size < 2 or num < 3:
            return -1
        at = plan[FIRST, c] + 1 + rand(rng) % (size - 1)
        o = rand(rng) % (num - 1)
        if o == c or o == c - 1:
            return -1
        new = rand(rng) % num_ranks
        merge_chunk(plan, o)
        if o < c:
            c -= 1
        split_chunk(plan, c, at, plan[RANK, c])
        plan[RANK, c + rand(rng) % 2] = new
    elif move == 13:  # copy order and patience from another chunk
        o = rand(rng) % num
        kind = rand(rng) % 2
        plan[KEY + kind, c] = plan[KEY + kind, o] + (rand(rng) % 3 - 1)
    elif move >= 15:  # relieve the rank with the most to do
        if not rebalance(plan, strategy, layers, num_ranks, num_microbatches, delay, move == 16, rng):
            return -1
    else:  # hold the activations of some layers in another way
        layer = rand(rng) % len(num_strategies)
        if num_strategies[layer] < 2:
            return -1
        new = rand(rng) % num_strategies[layer]
        size = 1 + rand(rng) % 4
        for i in range(layer, min(layer + size, len(num_strategies))):
            strategy[i] = min(new, num_strategies[i] - 1)
    return move


@kernel
def anneal(
    plan: Array, strategy: Array, best_plan: Array, best_strategy: Array, values: Array, layers: Array,
    num_strategies: Array, statics: Array, room: Array, num_microbatches: int, delay: int, stride: int,
    most_chunks: int, target: int, hot: float, cold: float, steps: int, weights: Array, rng: Array, trial: Array,
    trial_strategy: Array, ints: Array, end: Array, counts: Array,
) -> int:  # fmt: skip
    """Anneal a plan for some proposals, from temperature ``hot`` to ``cold`` in ns; return how many were run.

    ``values`` holds the makespans of the plan and of the best one. Stops at ``target``. ``counts`` (3, NUM_MOVES)
    counts proposals, acceptances and new bests of every move.
    """
    none = np.empty(0, np.int64)
    several = 0
    for layer in range(len(num_strategies)):
        several = max(several, num_strategies[layer])
    runs = 0
    heat = hot
    factor = (cold / hot) ** (1.0 / steps)
    for _ in range(steps):
        heat *= factor
        if values[1] <= target:
            break
        num = plan[SCALARS, NUM_CHUNKS]
        for k in range(SCALARS):
            for i in range(num + 1):
                trial[k, i] = plan[k, i]
        for i in range(2):
            trial[SCALARS, i] = plan[SCALARS, i]
        if several > 1:
            trial_strategy[:] = strategy
        move = change(
            trial,
            trial_strategy,
            num_strategies,
            layers,
            len(room),
            most_chunks,
            num_microbatches,
            delay,
            stride,
            weights,
            rng,
        )
        if move < 0:
            continue
        if rand(rng) % 8 == 0:
            change(
                trial,
                trial_strategy,
                num_strategies,
                layers,
                len(room),
                most_chunks,
                num_microbatches,
                delay,
                stride,
                weights,
                rng,
            )
        counts[0, move] += 1
        cutoff = values[0] + np.int64(-heat * np.log(uniform(rng))) + 1
        runs += 1
        value = evaluate(
            trial,
            layers,
            trial_strategy,
            statics,
            room,
            num_microbatches,
            delay,
            stride,
            cutoff,
            ints,
            end,
            none,
        )
        if value >= cutoff:
            continue
        counts[1, move] += 1
        values[0] = value
        num = trial[SCALARS, NUM_CHUNKS]
        for k in range(SCALARS):
            for i in range(num + 1):
                plan[k, i] = trial[k, i]
        for i in range(2):
            plan[SCALARS, i] = trial[SCALARS, i]
        strategy[:] = trial_strategy
        if value < values[1]:
            counts[2, move] += 1
            values[1] = value
            best_plan[:] = plan
            best_strategy[:] = strategy
    return runs
