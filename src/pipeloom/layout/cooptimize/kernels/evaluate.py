"""The makespan of a candidate: sum its layers to chunks and run the chunks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.compiled import Array, kernel
from pipeloom.layout.cooptimize.kernels.draft import FIRST, KEY, NUM_CHUNKS, RANK, SCALARS, SPREAD, ChainArrays, Draft
from pipeloom.layout.cooptimize.kernels.run import NEVER, ChunkSums, RunState, run


class Scratch(NamedTuple):
    """Working memory of one thread."""

    sums: ChunkSums
    state: RunState


@kernel
def evaluate(draft: Draft, chain: ChainArrays, scratch: Scratch, cutoff: int, record: Array) -> int:
    """Return the makespan of a draft in ns, including the updates at the end of the iteration.

    Return `NEVER` if the draft does not fit into memory or cannot be below ``cutoff``. The largest load + head + tail
    is checked first, so that few drafts have to run. ``record`` is that of `run`.
    """
    chunks, strategy, sums = draft.chunks, draft.strategy, scratch.sums
    num = chunks[SCALARS, NUM_CHUNKS]
    num_ranks = len(chain.capacity_bytes)
    rank = chunks[RANK]
    duration, key, held, split, hop = sums.duration, sums.key, sums.held, sums.split, sums.hop
    slack, load, head, tail, ending = sums.slack, sums.load, sums.head, sums.tail, sums.ending
    # Assign the fields that loops read to variables first, because reading a field of a tuple counts a reference.
    forward_ns, backward_ns, weight_ns = chain.forward_ns, chain.backward_ns, chain.weight_ns
    activation_bytes, gradient_bytes = chain.activation_bytes, chain.gradient_bytes
    static_bytes, capacity_bytes, end_ns = chain.static_bytes, chain.capacity_bytes, chain.end_ns
    spread = chunks[SCALARS, SPREAD]
    delay = chain.delay_ns
    for r in range(num_ranks):
        slack[r] = capacity_bytes[r]
        load[r] = 0
        head[r] = -1
        tail[r] = 0
        ending[r] = 0
    before = np.int64(0)
    after = np.int64(0)
    for c in range(num):
        for k in range(3):
            duration[k, c] = 0
        held[0, c] = 0
        held[1, c] = 0
        split[c] = 0
        r = rank[c]
        for layer in range(chunks[FIRST, c], chunks[FIRST, c + 1]):
            s = strategy[layer]
            duration[0, c] += forward_ns[layer, s]
            duration[1, c] += backward_ns[layer, s]
            duration[2, c] += weight_ns[layer, s]
            held[0, c] += activation_bytes[layer, s]
            held[1, c] += gradient_bytes[layer, s]
            if weight_ns[layer, 0] > 0 or weight_ns[layer, s] > 0:
                split[c] = 1
            slack[r] -= static_bytes[layer]
            ending[r] += end_ns[layer]
        if head[r] < 0:
            head[r] = before
            tail[r] = after
        if split[c] == 1:
            tail[r] = -1
            # Bytes that I adds at its end are reserved from the start. Otherwise a backward might not fit.
            held[0, c] = max(held[0, c], held[1, c])
        load[r] += duration[0, c] + duration[1, c] + duration[2, c]
        key[0, c] = chunks[KEY, c] + spread * before // 16
        before += duration[0, c]
        after += duration[1, c]
        key[1, c] = after
        key[2, c] = chunks[KEY + 2, c]
        hop[c] = 0
        if c + 1 < num and rank[c + 1] != r:
            hop[c] = delay
            before += delay
            after += delay
    for c in range(num):
        key[1, c] = chunks[KEY + 1, c] + spread * (before + after - key[1, c]) // 16
    for r in range(num_ranks):
        tail[r] = max(tail[r], ending[r])
        if head[r] >= 0 and load[r] * chain.num_microbatches + head[r] + tail[r] >= cutoff:
            return NEVER
    return run(chunks, chain, sums, scratch.state, cutoff, record)
