"""Changes of partition and placement that reduce the load of the busiest rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeloom.compiled import Array, allocating, kernel
from pipeloom.compiled.arrays import assign
from pipeloom.compiled.random import below, uniform
from pipeloom.layout.cooptimize.kernels.draft import (
    FIRST,
    KEY,
    NUM_CHUNKS,
    RANK,
    SCALARS,
    SPREAD,
    ChainArrays,
    Draft,
    copy_rows,
)
from pipeloom.layout.cooptimize.kernels.run import NEVER


class Balance(NamedTuple):
    """Parameters of load balancing; see `pipeloom.layout.cooptimize.params.BalanceParams`."""

    tries: int
    exchanges: int
    steps: int
    hot: float
    cold: float


@kernel
def _ends_bound(chunks: Array, sums: Array, load: Array, ends: Array, num_microbatches: int, delay: int) -> Any:
    """Return the largest load + head + tail of all ranks, in ns.

    ``sums`` are those of `_layer_sums`.
    """
    for r in range(len(load)):
        load[r] = 0
        ends[r] = -1
    hops = np.int64(0)
    for c in range(chunks[SCALARS, NUM_CHUNKS]):
        r = chunks[RANK, c]
        first = chunks[FIRST, c]
        if c > 0 and chunks[RANK, c - 1] != r:
            hops += delay
        load[r] += sums[2, chunks[FIRST, c + 1]] - sums[2, first]
        if ends[r] < 0:
            ends[r] = sums[0, first] + sums[1, first] + hops
    worst = np.int64(0)
    for r in range(len(load)):
        worst = max(worst, load[r] * num_microbatches + ends[r])
    return worst


@allocating
def _layer_sums(draft: Draft, chain: ChainArrays) -> Array:
    """Return running sums of F, of the B that counts in tails, of all work, and of B, shape (4, num_layers + 1).

    B counts in tails only if no weight gradient has duration.
    """
    sums = np.zeros((4, len(draft.strategy) + 1), np.int64)
    fillable = False
    for layer in range(len(draft.strategy)):
        s = draft.strategy[layer]
        forward, backward, weight = chain.forward_ns[layer, s], chain.backward_ns[layer, s], chain.weight_ns[layer, s]
        sums[0, layer + 1] = sums[0, layer] + forward
        sums[2, layer + 1] = sums[2, layer] + forward + backward + weight
        sums[3, layer + 1] = sums[3, layer] + backward
        fillable = fillable or weight > 0
    if not fillable:
        assign(sums[1], sums[3])
    return sums


@allocating
def rebalance(draft: Draft, chain: ChainArrays, balance: Balance, ranks_too: bool | np.bool_, rng: Array) -> bool:
    """Move a few boundaries (and ranks) to reduce the largest load + head + tail; return whether it was reduced."""
    chunks, num_ranks = draft.chunks, len(chain.capacity_bytes)
    num_microbatches, delay = chain.num_microbatches, chain.delay_ns
    num = chunks[SCALARS, NUM_CHUNKS]
    if num < 2:
        return False
    sums = _layer_sums(draft, chain)
    load = np.zeros(num_ranks, np.int64)
    ends = np.zeros(num_ranks, np.int64)
    now = _ends_bound(chunks, sums, load, ends, num_microbatches, delay)
    saved = np.empty((KEY, chunks.shape[1]), np.int64)
    copy_rows(chunks, saved, KEY)
    for _ in range(balance.tries):
        for _change in range(1 + below(rng, 4)):
            if ranks_too and below(rng, 3) == 0:
                c = below(rng, num)
                o = below(rng, num)
                if below(rng, 2):
                    chunks[RANK, c], chunks[RANK, o] = chunks[RANK, o], chunks[RANK, c]
                else:
                    chunks[RANK, c] = below(rng, num_ranks)
            else:
                c = 1 + below(rng, num - 1)
                at = chunks[FIRST, c] + (1 if below(rng, 2) else -1)
                if chunks[FIRST, c - 1] < at < chunks[FIRST, c + 1]:
                    chunks[FIRST, c] = at
        if _ends_bound(chunks, sums, load, ends, num_microbatches, delay) < now:
            return True
        copy_rows(saved, chunks, KEY)
    return False


@allocating
def repartition(draft: Draft, chain: ChainArrays, balance: Balance, ranks_too: bool, goal: int, rng: Array) -> int:
    """Anneal boundaries (and ranks) on loads alone, until the largest load + head + tail is at most ``goal``.

    Write the best partition found into the draft; return its largest load + head + tail, in ns. The keys of chunks are
    shifted with their times in the pass of a microbatch. If the draft has a spread, `evaluate` does this.
    """
    chunks, num_ranks = draft.chunks, len(chain.capacity_bytes)
    num_microbatches, delay = chain.num_microbatches, chain.delay_ns
    num = chunks[SCALARS, NUM_CHUNKS]
    if num < 2:
        return NEVER
    sums = _layer_sums(draft, chain)
    load = np.zeros(num_ranks, np.int64)
    ends = np.zeros(num_ranks, np.int64)
    old, best = np.empty((KEY, chunks.shape[1]), np.int64), np.empty((KEY, chunks.shape[1]), np.int64)
    copy_rows(chunks, old, KEY)
    copy_rows(chunks, best, KEY)
    now = _ends_bound(chunks, sums, load, ends, num_microbatches, delay)
    least = now
    heat = balance.hot * now
    cooling = (balance.cold / balance.hot) ** (1.0 / balance.steps)
    for _ in range(balance.steps):
        if least <= goal:
            break
        heat *= cooling
        kind = below(rng, 8) if ranks_too else 0
        c = 0
        o = 0
        kept = np.int64(0)
        if kind <= 4:
            c = 1 + below(rng, num - 1)
            by = 1 + below(rng, 2)
            kept = chunks[FIRST, c]
            at = kept + (by if below(rng, 2) else -by)
            if at <= chunks[FIRST, c - 1] or at >= chunks[FIRST, c + 1]:
                continue
            chunks[FIRST, c] = at
        elif kind <= 6:
            c = below(rng, num)
            o = below(rng, num)
            if chunks[RANK, c] == chunks[RANK, o]:
                continue
            chunks[RANK, c], chunks[RANK, o] = chunks[RANK, o], chunks[RANK, c]
        else:
            c = below(rng, num)
            kept = chunks[RANK, c]
            chunks[RANK, c] = below(rng, num_ranks)
        value = _ends_bound(chunks, sums, load, ends, num_microbatches, delay)
        if value <= now or uniform(rng) < np.exp((now - value) / heat):
            now = value
            if value < least:
                least = value
                copy_rows(chunks, best, KEY)
        elif kind <= 4:
            chunks[FIRST, c] = kept
        elif kind <= 6:
            chunks[RANK, c], chunks[RANK, o] = chunks[RANK, o], chunks[RANK, c]
        else:
            chunks[RANK, c] = kept
    copy_rows(best, chunks, KEY)
    if chunks[SCALARS, SPREAD] > 0:
        return int(least)
    for c in range(num):
        chunks[KEY, c] += sums[0, chunks[FIRST, c]] - sums[0, old[FIRST, c]]
        chunks[KEY + 1, c] += sums[3, old[FIRST, c + 1]] - sums[3, chunks[FIRST, c + 1]]
    return int(least)


@allocating
def exchange_layers(draft: Draft, chain: ChainArrays, balance: Balance, limit: int, rng: Array) -> bool:
    """Exchange two or three single layers of different ranks, or two layers of one rank and one of another.

    An exchange is made only if load + head + tail remain below ``limit`` on every rank. A layer that leaves its chunk
    keeps the keys of the chunk. Return whether an exchange was made.
    """
    chunks, num_ranks = draft.chunks, len(chain.capacity_bytes)
    num_microbatches, delay = chain.num_microbatches, chain.delay_ns
    num = chunks[SCALARS, NUM_CHUNKS]
    n = len(draft.strategy)
    sums = _layer_sums(draft, chain)
    home = np.empty(n, np.int64)
    origin = np.empty(n, np.int64)
    load = np.zeros(num_ranks, np.int64)
    for c in range(num):
        for i in range(chunks[FIRST, c], chunks[FIRST, c + 1]):
            home[i] = chunks[RANK, c]
            origin[i] = c
        load[chunks[RANK, c]] += sums[2, chunks[FIRST, c + 1]] - sums[2, chunks[FIRST, c]]
    picked = np.empty(3, np.int64)
    to = np.empty(3, np.int64)
    for _ in range(balance.exchanges):
        count = 2 + below(rng, 2)
        for q in range(count):
            picked[q] = below(rng, n)
        a, b = home[picked[0]], home[picked[1]]
        if a == b:
            continue
        to[0], to[1] = b, a
        if count == 3:
            c = home[picked[2]]
            if picked[2] == picked[0] or picked[2] == picked[1]:
                continue
            if c == a:
                to[2] = b
            elif c == b:
                to[2] = a
            else:
                to[1], to[2] = c, a
        for q in range(count):
            work = sums[2, picked[q] + 1] - sums[2, picked[q]]
            load[home[picked[q]]] -= work
            load[to[q]] += work
        fits = True
        for r in range(num_ranks):
            fits = fits and load[r] * num_microbatches < limit
        if fits:
            for q in range(count):
                a = home[picked[q]]
                home[picked[q]] = to[q]
                to[q] = a
            fits = _ends_fit(home, sums, load, num_microbatches, delay, limit)
            made = 1
            for i in range(1, n):
                if home[i] != home[i - 1] or origin[i] != origin[i - 1]:
                    made += 1
            if fits and made <= chain.most_chunks:
                _regroup(chunks, home, origin)
                return True
            for q in range(count):
                a = home[picked[q]]
                home[picked[q]] = to[q]
                to[q] = a
        for q in range(count):
            work = sums[2, picked[q] + 1] - sums[2, picked[q]]
            load[home[picked[q]]] += work
            load[to[q]] -= work
    return False


@kernel
def _ends_fit(home: Array, sums: Array, load: Array, num_microbatches: int, delay: int, limit: int) -> bool:
    """Return whether load + head + tail of every rank are below ``limit``."""
    seen = 0
    hops = np.int64(0)
    for i in range(len(home)):
        if i > 0 and home[i] != home[i - 1]:
            hops += delay
        first = True
        for before in range(i):
            if home[before] == home[i]:
                first = False
                break
        if first:
            seen += 1
            if load[home[i]] * num_microbatches + sums[0, i] + sums[1, i] + hops >= limit:
                return False
            if seen == len(load):
                break
    return True


@allocating
def _regroup(chunks: Array, home: Array, origin: Array) -> None:
    """Rebuild the chunks from the ranks of the layers. Each chunk has the keys of the previous chunk of its layers."""
    old = np.empty((SCALARS, chunks.shape[1]), np.int64)
    copy_rows(chunks, old, SCALARS)
    num = 0
    n = len(home)
    for i in range(n):
        if i == 0 or home[i] != home[i - 1] or origin[i] != origin[i - 1]:
            chunks[FIRST, num] = i
            chunks[RANK, num] = home[i]
            for k in range(KEY, SCALARS):
                chunks[k, num] = old[k, origin[i]]
            num += 1
    chunks[FIRST, num] = n
    chunks[SCALARS, NUM_CHUNKS] = num
