"""The moves of the joint search. Each makes one random change of a draft in place and returns whether it did.

``c`` is a random chunk. Moves that need further chunks draw them. `pipeloom.layout.cooptimize.kernels.move_table` lists
all moves with their weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeloom.compiled import Array, callee
from pipeloom.compiled.random import below, uniform
from pipeloom.layout.cooptimize.kernels.balance import Balance, exchange_layers, rebalance
from pipeloom.layout.cooptimize.kernels.draft import (
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
    ChainArrays,
    Draft,
    merge_chunk,
    split_chunk,
)

PRESENT, BEST = 0, 1
"""Places in `MoveContext.values`."""


class MoveContext(NamedTuple):
    """Data that moves read in addition to the draft.

    ``values`` are the makespans of the current and the best draft, in ns; ``rng`` is the state of
    `pipeloom.compiled.random`.
    """

    chain: ChainArrays
    balance: Balance
    values: Array
    rng: Array


@callee
def change_turns(draft: Draft, _c: int, context: MoveContext) -> bool:
    """Change how many microbatches take turns."""
    chain = context.chain
    most = min(chain.num_microbatches, 3 * len(chain.capacity_bytes))
    draft.chunks[SCALARS, PERIOD] = 1 + below(context.rng, most)
    return True


@callee
def change_spread(draft: Draft, _c: int, context: MoveContext) -> bool:
    """Change the spread of the keys of chunks."""
    draft.chunks[SCALARS, SPREAD] = max(0, draft.chunks[SCALARS, SPREAD] + below(context.rng, 17) - 8)
    return True


@callee
def shift_key(draft: Draft, c: int, context: MoveContext) -> bool:
    """Advance or delay one task of a chunk."""
    kind, shift = _shift(context)
    draft.chunks[KEY + kind, c] += shift
    return True


@callee
def shift_keys(draft: Draft, c: int, context: MoveContext) -> bool:
    """Advance or delay one task of consecutive chunks."""
    kind, shift = _shift(context)
    o = below(context.rng, draft.chunks[SCALARS, NUM_CHUNKS])
    for i in range(min(c, o), max(c, o) + 1):
        draft.chunks[KEY + kind, i] += shift
    return True


@callee
def _shift(context: MoveContext) -> tuple[int, Any]:
    """Draw a kind of task and a shift of up to two strides in either direction, at a scale down to 1/64 of a stride."""
    rng = context.rng
    kind = below(rng, 3)
    scale = context.chain.stride_ns >> below(rng, 7)
    return kind, np.int64((uniform(rng) - 0.5) * 4.0 * scale)


@callee
def copy_key(draft: Draft, c: int, context: MoveContext) -> bool:
    """Place a chunk's F or B beside another chunk's in the order."""
    chunks, rng = draft.chunks, context.rng
    o = below(rng, chunks[SCALARS, NUM_CHUNKS])
    kind = below(rng, 2)
    chunks[KEY + kind, c] = chunks[KEY + kind, o] + (below(rng, 3) - 1)
    return True


@callee
def change_wait(draft: Draft, c: int, context: MoveContext) -> bool:
    """Change how long a rank waits for F or B of a chunk."""
    rng = context.rng
    kind = below(rng, 2)
    stride = context.chain.stride_ns
    draft.chunks[WAIT + kind, c] = 0 if below(rng, 2) else np.int64(uniform(rng) * uniform(rng) * stride)
    return True


@callee
def change_limits(draft: Draft, c: int, context: MoveContext) -> bool:
    """Change how many microbatches of one or several chunks may be in flight."""
    chunks, rng, num_microbatches = draft.chunks, context.rng, context.chain.num_microbatches
    o = below(rng, chunks[SCALARS, NUM_CHUNKS]) if below(rng, 2) else c
    new = 1 + below(rng, num_microbatches)
    for i in range(min(c, o), max(c, o) + 1):
        chunks[LIMIT, i] = new if new < num_microbatches else UNLIMITED
    return True


@callee
def cut_chunk(draft: Draft, c: int, context: MoveContext) -> bool:
    """Cut a chunk in two and place one of the parts on a random rank."""
    chunks, rng = draft.chunks, context.rng
    size = chunks[FIRST, c + 1] - chunks[FIRST, c]
    if size < 2 or chunks[SCALARS, NUM_CHUNKS] >= context.chain.most_chunks:
        return False
    new = below(rng, len(context.chain.capacity_bytes))
    at = chunks[FIRST, c] + 1 + below(rng, size - 1)
    split_chunk(chunks, c, at, chunks[RANK, c])
    chunks[RANK, c + below(rng, 2)] = new
    return True


@callee
def join_chunks(draft: Draft, c: int, context: MoveContext) -> bool:
    """Join two adjacent chunks, on the rank of either."""
    chunks = draft.chunks
    num = chunks[SCALARS, NUM_CHUNKS]
    if num < 2 or c + 1 >= num:
        return False
    if below(context.rng, 2):
        chunks[RANK, c] = chunks[RANK, c + 1]
    merge_chunk(chunks, c)
    return True


@callee
def cut_and_join(draft: Draft, c: int, context: MoveContext) -> bool:
    """Cut a chunk at one place and join two chunks at another."""
    chunks, rng = draft.chunks, context.rng
    num = chunks[SCALARS, NUM_CHUNKS]
    size = chunks[FIRST, c + 1] - chunks[FIRST, c]
    if size < 2 or num < 3:
        return False
    at = chunks[FIRST, c] + 1 + below(rng, size - 1)
    o = below(rng, num - 1)
    if o == c or o == c - 1:
        return False
    new = below(rng, len(context.chain.capacity_bytes))
    merge_chunk(chunks, o)
    if o < c:
        c -= 1
    split_chunk(chunks, c, at, chunks[RANK, c])
    chunks[RANK, c + below(rng, 2)] = new
    return True


@callee
def exchange_ranks(draft: Draft, c: int, context: MoveContext) -> bool:
    """Exchange the ranks of two chunks."""
    chunks = draft.chunks
    o = below(context.rng, chunks[SCALARS, NUM_CHUNKS])
    if chunks[RANK, c] == chunks[RANK, o]:
        return False
    chunks[RANK, c], chunks[RANK, o] = chunks[RANK, o], chunks[RANK, c]
    return True


@callee
def permute_ranks(draft: Draft, _c: int, context: MoveContext) -> bool:
    """Permute the ranks of consecutive chunks."""
    chunks, rng = draft.chunks, context.rng
    num = chunks[SCALARS, NUM_CHUNKS]
    size = min(2 + below(rng, len(context.chain.capacity_bytes)), num)
    c = below(rng, num - size + 1)
    for i in range(size - 1, 0, -1):
        j = below(rng, i + 1)
        chunks[RANK, c + i], chunks[RANK, c + j] = chunks[RANK, c + j], chunks[RANK, c + i]
    return True


@callee
def relabel_suffix(draft: Draft, c: int, context: MoveContext) -> bool:
    """Exchange two ranks in all chunks from a random one on."""
    chunks, num_ranks = draft.chunks, len(context.chain.capacity_bytes)
    a = below(context.rng, num_ranks)
    b = below(context.rng, num_ranks)
    if a == b:
        return False
    for i in range(c, chunks[SCALARS, NUM_CHUNKS]):
        if chunks[RANK, i] == a:
            chunks[RANK, i] = b
        elif chunks[RANK, i] == b:
            chunks[RANK, i] = a
    return True


@callee
def change_rank(draft: Draft, c: int, context: MoveContext) -> bool:
    """Place a chunk on a random rank."""
    draft.chunks[RANK, c] = below(context.rng, len(context.chain.capacity_bytes))
    return True


@callee
def move_boundary(draft: Draft, _c: int, context: MoveContext) -> bool:
    """Move one to three layers from a chunk to an adjacent one."""
    rng = context.rng
    num = draft.chunks[SCALARS, NUM_CHUNKS]
    if num < 2:
        return False
    c = 1 + below(rng, num - 1)
    by = 1 + below(rng, 3)
    return _moved(draft.chunks, c, by if below(rng, 2) else -by)


@callee
def move_two_boundaries(draft: Draft, _c: int, context: MoveContext) -> bool:
    """Move one layer across each of two boundaries, so that two ranks may exchange load."""
    rng = context.rng
    num = draft.chunks[SCALARS, NUM_CHUNKS]
    if num < 3:
        return False
    for _side in range(2):
        c = 1 + below(rng, num - 1)
        if not _moved(draft.chunks, c, 1 if below(rng, 2) else -1):
            return False
    return True


@callee
def _moved(chunks: Array, c: int, by: int) -> bool:
    """Move the boundary before chunk ``c`` if both chunks keep a layer; return whether it moved."""
    at = chunks[FIRST, c] + by
    if at <= chunks[FIRST, c - 1] or at >= chunks[FIRST, c + 1]:
        return False
    chunks[FIRST, c] = at
    return True


@callee
def relieve_by_boundaries(draft: Draft, _c: int, context: MoveContext) -> bool:
    """Move boundaries until the load of the busiest rank is lower."""
    return rebalance(draft, context.chain, context.balance, np.bool_(False), context.rng)


@callee
def relieve_rank(draft: Draft, _c: int, context: MoveContext) -> bool:
    """Move boundaries and chunks until the load of the busiest rank is lower."""
    return rebalance(draft, context.chain, context.balance, np.bool_(True), context.rng)


@callee
def swap_layers(draft: Draft, _c: int, context: MoveContext) -> bool:
    """Exchange single layers if load + head + tail of every rank remain below the current makespan."""
    return exchange_layers(draft, context.chain, context.balance, context.values[PRESENT], context.rng)


@callee
def change_strategies(draft: Draft, _c: int, context: MoveContext) -> bool:
    """Change the memory strategy of a few consecutive layers."""
    counts, rng = context.chain.num_strategies, context.rng
    layer = below(rng, len(counts))
    if counts[layer] < 2:
        return False
    new = below(rng, counts[layer])
    size = 1 + below(rng, 4)
    for i in range(layer, min(layer + size, len(counts))):
        draft.strategy[i] = min(new, counts[i] - 1)
    return True
