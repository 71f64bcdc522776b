"""The rule of the joint search, run: which task every rank takes next, and when all have ended.

What the rule means: ``docs/cooptimize.md``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import inlined, kernel
from pipeloom.layout.cooptimize.kernels.draft import LIMIT, NUM_CHUNKS, PERIOD, RANK, SCALARS, WAIT, ChainArrays

Array = npt.NDArray[Any]

NEVER = 2**62


@inlined
def first_due(wake: Array, num_ranks: int) -> int:
    """Rank that could start first."""
    first = 0
    for r in range(1, num_ranks):
        if wake[r] < wake[first]:
            first = r
    return first


class ChunkSums(NamedTuple):
    """Layers summed to chunks, and what `run` has to know of every rank.

    Attributes
    ----------
    duration, key : array, shape (3, num_chunks)
        Rows F, B or I, W.
    held : array, shape (2, num_chunks)
        Bytes from F to B or I, and from I to W; the first not less than the second.
    split, hop : array, shape (num_chunks,)
        ``split``: the chunk has a W. ``hop[c]``: delay between chunk c and the next.
    slack : array, shape (num_ranks,)
        Capacity less static bytes. A rank must have room for one microbatch of each of its chunks.
    load, head, tail : array, shape (num_ranks,)
        Work of one microbatch, and least times before a rank's first task and after its last one.
    ending : array, shape (num_ranks,)
        What a rank does when its last task has ended; not more than ``tail``.
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
    """What a run writes while it goes.

    Attributes
    ----------
    end : array, shape (2, num_chunks * num_microbatches)
        Of F, and of B or I.
    done, ready, now_key : array, shape (3, num_chunks)
        By kind of task: microbatches begun, when the next one may begin, and its key.
    admitted, listed : array, shape (num_chunks,)
        Whether memory and limit let another F begin; chunks by rank.
    row : array, shape (num_ranks + 1,)
        Where a rank's chunks begin in ``listed``.
    free, wake, left : array, shape (num_ranks,)
        When a rank has ended its last task, when it could start the next, and the work that it has left.
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
    """Run all microbatches greedily; return when all ranks have ended, or `NEVER` once it cannot be below ``cutoff``.

    Of all ranks the one that could start first does, and takes of its ready and admitted tasks the one with the
    least key. Instead it waits where a task with a lesser key is certain to be ready within that task's tolerance.
    Microbatch m adds ``m // period * period * stride`` to its keys. A chunk takes no further F while as many of its
    microbatches as its limit says, at least 1, wait for B or I.

    Parameters
    ----------
    chunks : array
        Of a `Draft`: ranks, tolerances, limits and period are read; keys are those of ``sums``.
    chain : ChainArrays
    sums : ChunkSums
    state : RunState
    cutoff : int
    record : array
        Where as long as there are tasks, gets (kind, chunk, microbatch) codes in order of dispatch; else untouched.

    Notes
    -----
    Admission: for every chunk j of the rank, what chunks up to j hold, and one microbatch of each later chunk, must
    fit. The oldest microbatch in flight is then always admitted to its next chunk, once weight gradients have run,
    and no other of that chunk is in flight, so the rule never deadlocks (``docs/cooptimize.md``).
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
            admitted[c] = 1 if need <= room and done[0, c] - done[1, c] < limit[c] else 0
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
