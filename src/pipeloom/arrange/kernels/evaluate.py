"""The makespan of a candidate: its layers summed to chunks, and these run."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.arrange.kernels.plan import FIRST, KEY, LIMIT, NUM_CHUNKS, PERIOD, RANK, SCALARS, SPREAD, WAIT
from pipeloom.arrange.kernels.run import NEVER, run
from pipeloom.compiled import kernel

Array = npt.NDArray[Any]


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
    key = ints[26:29]
    spread = plan[SCALARS, SPREAD]
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
        key[0, c] = plan[KEY, c] + spread * before // 16
        before += duration[0, c]
        after += duration[1, c]
        key[1, c] = after
        key[2, c] = plan[KEY + 2, c]
        hop[c] = 0
        if c + 1 < num and rank[c + 1] != r:
            hop[c] = delay
            before += delay
            after += delay
    for c in range(num):
        key[1, c] = plan[KEY + 1, c] + spread * (before + after - key[1, c]) // 16
    for r in range(num_ranks):
        tail[r] = max(tail[r], 0)
        if head[r] >= 0 and load[r] * num_microbatches + head[r] + tail[r] >= cutoff:
            return NEVER
    return run(
        num, num_microbatches, rank, duration, split, held, slack, hop, tail, key,
        plan[WAIT : WAIT + 3], plan[LIMIT], plan[SCALARS, PERIOD], stride, cutoff, end, ints[11:14], ints[14:17],
        ints[17:20], ints[20], ints[21], ints[22], ints[23], ints[24], ints[25], record,
    )  # fmt: skip
