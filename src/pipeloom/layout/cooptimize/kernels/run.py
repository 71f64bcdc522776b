"""List scheduling by the priority rule of the joint search. ``docs/cooptimize.md`` describes the rule.

`pipeloom.search.kernels.by_task` runs the same rules on any task graph. This kernel exists because every evaluation has
another placement. A new graph, its priorities and `decode_by_task` take 35 to 110 times as long as `evaluate`. Even on
a graph that exists, `decode_by_task` takes 1.5 to 2.7 times as long (``python -m benchmarks list_scheduling``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeloom.compiled import Array, inlined, kernel
from pipeloom.layout.cooptimize.kernels.draft import LIMIT, NUM_CHUNKS, PERIOD, RANK, SCALARS, WAIT, ChainArrays

NEVER = 2**62


@inlined
def first_due(wake: Array, num_ranks: int) -> int:
    """Return the rank that could start a task first."""
    first = 0
    for r in range(1, num_ranks):
        if wake[r] < wake[first]:
            first = r
    return first


class ChunkSums(NamedTuple):
    """Layers summed to chunks, and properties of ranks, in ns and bytes.

    Attributes
    ----------
    duration, key : array, shape (3, num_chunks)
        Rows F, B or I, W.
    held : array, shape (2, num_chunks)
        Bytes held from F to B or I, and from I to W. The first is not less than the second.
    split, hop : array, shape (num_chunks,)
        Whether the chunk has a W, and the delay between the chunk and the next one.
    slack : array, shape (num_ranks,)
        Capacity minus static bytes. One microbatch of each chunk of the rank must fit.
    load, head, tail : array, shape (num_ranks,)
        Work of one microbatch, and the least times before the first task of the rank and after its last task.
    ending : array, shape (num_ranks,)
        Time that a rank needs after its last task; at most ``tail``.
    """

    duration: Array
    key: Array
    held: Array
    split: Array
    hop: Array
    slack: Array
    load: Array
    head: Array
    tail: Array
    ending: Array


class RunState(NamedTuple):
    """Arrays that a run writes.

    Attributes
    ----------
    end : array, shape (2, num_chunks * num_microbatches)
        Ends of F, and of B or I, in ns.
    done, ready, now_key : array, shape (3, num_chunks)
        By kind of task: the number of microbatches begun, the time at which the next one may begin, and its key.
    admitted, listed : array, shape (num_chunks,)
        Whether memory and limit allow another F to begin; and chunks sorted by rank.
    row : array, shape (num_ranks + 1,)
        Where the chunks of each rank begin in ``listed``.
    free, wake, left : array, shape (num_ranks,)
        End of the last task of the rank, the time at which it could start the next, and its remaining work.
    """

    end: Array
    done: Array
    ready: Array
    now_key: Array
    admitted: Array
    listed: Array
    row: Array
    free: Array
    wake: Array
    left: Array


@kernel
def run(chunks: Array, chain: ChainArrays, sums: ChunkSums, state: RunState, cutoff: int, record: Array) -> int:
    """Run all microbatches greedily; return the makespan in ns, or `NEVER` once it cannot be below ``cutoff``.

    Each step takes the rank that could start first. It runs its ready and admitted task with the lowest key, or it
    waits if a task with a lower key will be ready within its tolerance. The keys of microbatch m increase by
    ``m // period * period * stride``. A chunk starts no further F while the number of its microbatches that wait for B
    or I is at its limit, which is at least 1.

    Parameters
    ----------
    chunks : array
        Chunks of a `Draft`. Ranks, tolerances, limits and period are read; keys are those of ``sums``.
    record : array
        Receives a code of (kind, chunk, microbatch) for every task, in the order in which tasks start, if it is long
        enough. Otherwise it is not written.

    Notes
    -----
    A forward is admitted only if, for every chunk j of the rank, the bytes held by the chunks up to j and one
    microbatch of each later chunk fit. Then, once weight gradients have run, the oldest microbatch in flight is always
    admitted to its next chunk, where no other microbatch is in flight. The rule therefore never deadlocks
    (``docs/cooptimize.md``).
    """
    rank, wait, limit = chunks[RANK], chunks[WAIT : WAIT + 3], chunks[LIMIT]
    duration, key, held, split, hop = sums.duration, sums.key, sums.held, sums.split, sums.hop
    slack, tail, ending = sums.slack, sums.tail, sums.ending
    end, done, ready, now_key = state.end, state.done, state.ready, state.now_key
    admitted, listed, row = state.admitted, state.listed, state.row
    free, wake, left = state.free, state.wake, state.left
    num_chunks, num_microbatches = chunks[SCALARS, NUM_CHUNKS], chain.num_microbatches
    period, stride = chunks[SCALARS, PERIOD], chain.stride_ns
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
    tolerant = False
    for c in range(num_chunks):
        for k in range(3):
            if wait[k, c] > 0:
                tolerant = True
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
        r = first_due(wake, num_ranks)
        t = wake[r]
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
            if tolerant:
                soonest = np.int64(NEVER)
                for i in range(row[r], row[r + 1]):
                    c = listed[i]
                    for k in range(2):
                        if ready[k, c] > t and (k == 1 or admitted[c] == 1):
                            soonest = min(soonest, ready[k, c])
                            if now_key[k, c] < best and ready[k, c] - t <= wait[k, c]:
                                waiting = True
                if waiting:
                    # Other ranks may be due earlier. Continue with the rank that is now first.
                    wake[r] = soonest
                    r = first_due(wake, num_ranks)
                    t = wake[r]
        if t + left[r] + tail[r] >= cutoff:
            return NEVER
        m = done[kind, chunk]
        finish = t + duration[kind, chunk]
        left[r] -= duration[kind, chunk]
        free[r] = finish
        makespan = max(makespan, finish + ending[r])
        if writes:
            record[step] = (kind * num_chunks + chunk) * num_microbatches + m
        # Advance to the next microbatch of this kind and chunk.
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
        # Update admission on this rank, from its last chunk to its first.
        use = np.int64(0)
        later = np.int64(0)
        for i in range(row[r], row[r + 1]):
            c = listed[i]
            use += (done[0, c] - done[1, c]) * held[0, c]
            if split[c]:
                use += (done[1, c] - done[2, c]) * held[1, c]
        headroom = np.int64(NEVER)
        soonest = np.int64(NEVER)
        for i in range(row[r + 1] - 1, row[r] - 1, -1):
            c = listed[i]
            headroom = min(headroom, slack[r] - use - later)
            need = held[0, c]
            admitted[c] = 1 if need <= headroom and done[0, c] - done[1, c] < limit[c] else 0
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
