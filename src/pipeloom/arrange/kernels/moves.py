"""Random changes of a candidate."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.arrange.kernels.balance import exchange_layers, rebalance
from pipeloom.arrange.kernels.plan import (
    FIRST,
    KEY,
    LIMIT,
    NUM_CHUNKS,
    PERIOD,
    RANK,
    SCALARS,
    SPREAD,
    UNLIMITED,
    WAIT,
    merge_chunk,
    split_chunk,
)
from pipeloom.compiled import kernel
from pipeloom.compiled.random import below, uniform

Array = npt.NDArray[Any]

NUM_MOVES = 20


@kernel
def change(
    plan: Array, strategy: Array, num_strategies: Array, layers: Array, num_ranks: int, most_chunks: int,
    num_microbatches: int, delay: int, stride: int, limit: int, weights: Array, rng: Array,
) -> int:  # fmt: skip
    """Make one random change of a plan in place; return its number, or -1 where it changed nothing."""
    num = plan[SCALARS, NUM_CHUNKS]
    pick = uniform(rng) * weights[NUM_MOVES - 1]
    move = 0
    while weights[move] <= pick:
        move += 1
    c = below(rng, num)
    if move == 0:  # how many microbatches take turns
        plan[SCALARS, PERIOD] = 1 + below(rng, min(num_microbatches, 3 * num_ranks))
    elif move == 1:  # cut a chunk in two
        size = plan[FIRST, c + 1] - plan[FIRST, c]
        if size < 2 or num >= most_chunks:
            return -1
        new = below(rng, num_ranks)
        at = plan[FIRST, c] + 1 + below(rng, size - 1)
        split_chunk(plan, c, at, plan[RANK, c])
        plan[RANK, c + below(rng, 2)] = new
    elif move == 2:  # two chunks exchange ranks
        o = below(rng, num)
        if plan[RANK, c] == plan[RANK, o]:
            return -1
        plan[RANK, c], plan[RANK, o] = plan[RANK, o], plan[RANK, c]
    elif move == 3:  # permute the ranks of consecutive chunks
        size = min(2 + below(rng, num_ranks), num)
        c = below(rng, num - size + 1)
        for i in range(size - 1, 0, -1):
            j = below(rng, i + 1)
            plan[RANK, c + i], plan[RANK, c + j] = plan[RANK, c + j], plan[RANK, c + i]
    elif move == 4 or move == 5:  # shift the key of one task, or of one task in all chunks
        kind = below(rng, 3)
        scale = stride >> below(rng, 7)
        shift = np.int64((uniform(rng) - 0.5) * 4.0 * scale)
        if move == 4:
            plan[KEY + kind, c] += shift
        else:
            o = below(rng, num)
            for i in range(min(c, o), max(c, o) + 1):
                plan[KEY + kind, i] += shift
    elif move == 6:  # waiting
        kind = below(rng, 2)
        plan[WAIT + kind, c] = 0 if below(rng, 2) else np.int64(uniform(rng) * uniform(rng) * stride)
    elif move == 7:  # move a boundary
        if num < 2:
            return -1
        c = 1 + below(rng, num - 1)
        by = 1 + below(rng, 3)
        by = by if below(rng, 2) else -by
        at = plan[FIRST, c] + by
        if at <= plan[FIRST, c - 1] or at >= plan[FIRST, c + 1]:
            return -1
        plan[FIRST, c] = at
    elif move == 8:  # relabel the ranks of a suffix
        a = below(rng, num_ranks)
        b = below(rng, num_ranks)
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
        if below(rng, 2):
            plan[RANK, c] = plan[RANK, c + 1]
        merge_chunk(plan, c)
    elif move == 10:  # a chunk to another rank
        plan[RANK, c] = below(rng, num_ranks)
    elif move == 11:  # two boundaries at once, so that loads may be exchanged
        if num < 3:
            return -1
        for _side in range(2):
            c = 1 + below(rng, num - 1)
            by = 1 if below(rng, 2) else -1
            at = plan[FIRST, c] + by
            if at <= plan[FIRST, c - 1] or at >= plan[FIRST, c + 1]:
                return -1
            plan[FIRST, c] = at
    elif move == 12:  # cut at one place and join at another
        size = plan[FIRST, c + 1] - plan[FIRST, c]
        if size < 2 or num < 3:
            return -1
        at = plan[FIRST, c] + 1 + below(rng, size - 1)
        o = below(rng, num - 1)
        if o == c or o == c - 1:
            return -1
        new = below(rng, num_ranks)
        merge_chunk(plan, o)
        if o < c:
            c -= 1
        split_chunk(plan, c, at, plan[RANK, c])
        plan[RANK, c + below(rng, 2)] = new
    elif move == 13:  # copy order and patience from another chunk
        o = below(rng, num)
        kind = below(rng, 2)
        plan[KEY + kind, c] = plan[KEY + kind, o] + (below(rng, 3) - 1)
    elif move == 17:  # how many microbatches of one chunk, or of some, may be in flight
        o = below(rng, num) if below(rng, 2) else c
        new = 1 + below(rng, num_microbatches)
        for i in range(min(c, o), max(c, o) + 1):
            plan[LIMIT, i] = new if new < num_microbatches else UNLIMITED
    elif move == 18:  # how far chunks are apart in the order
        plan[SCALARS, SPREAD] = max(0, plan[SCALARS, SPREAD] + below(rng, 17) - 8)
    elif move == 19:  # single layers change places
        if not exchange_layers(
            plan, strategy, layers, num_ranks, most_chunks, num_microbatches, delay, limit, rng
        ):
            return -1
    elif move >= 15:  # relieve the rank with the most to do
        if not rebalance(plan, strategy, layers, num_ranks, num_microbatches, delay, move == 16, rng):
            return -1
    else:  # hold the activations of some layers in another way
        layer = below(rng, len(num_strategies))
        if num_strategies[layer] < 2:
            return -1
        new = below(rng, num_strategies[layer])
        size = 1 + below(rng, 4)
        for i in range(layer, min(layer + size, len(num_strategies))):
            strategy[i] = min(new, num_strategies[i] - 1)
    return move
