"""Shifting layers and chunks so that the rank with the most to do has less."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.arrange.kernels.plan import FIRST, KEY, NUM_CHUNKS, RANK, SCALARS, SPREAD
from pipeloom.arrange.kernels.run import NEVER
from pipeloom.compiled import kernel
from pipeloom.compiled.random import below, uniform

Array = npt.NDArray[Any]

_TRIES = 40
_EXCHANGES = 100
_HOT, _COLD = 0.005, 0.0005
"""Temperatures of `repartition`, of the largest load."""


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
def layer_sums(strategy: Array, layers: Array, sums: Array) -> bool:
    """Write running sums of F, of B, and of all work of the layers; say whether any weight gradient can fill time."""
    fillable = False
    for layer in range(len(strategy)):
        s = strategy[layer]
        sums[0, layer + 1] = sums[0, layer] + layers[0, layer, s]
        sums[1, layer + 1] = sums[1, layer] + layers[1, layer, s]
        sums[2, layer + 1] = sums[2, layer] + layers[0, layer, s] + layers[1, layer, s] + layers[2, layer, s]
        fillable = fillable or layers[2, layer, s] > 0
    return fillable


@kernel
def rebalance(
    plan: Array, strategy: Array, layers: Array, num_ranks: int, num_microbatches: int, delay: int, ranks_too: bool,
    rng: Array,
) -> bool:  # fmt: skip
    """Move a few boundaries (and ranks) so that the rank with the most to do has less; say whether that was found."""
    num = plan[SCALARS, NUM_CHUNKS]
    if num < 2:
        return False
    sums = np.zeros((3, len(strategy) + 1), np.int64)
    if layer_sums(strategy, layers, sums):
        sums[1, :] = 0
    load = np.zeros(num_ranks, np.int64)
    ends = np.zeros(num_ranks, np.int64)
    now = ends_bound(plan, sums, load, ends, num_microbatches, delay)
    saved = plan[:KEY].copy()
    for _ in range(_TRIES):
        for _change in range(1 + below(rng, 4)):
            if ranks_too and below(rng, 3) == 0:
                c = below(rng, num)
                o = below(rng, num)
                if below(rng, 2):
                    plan[RANK, c], plan[RANK, o] = plan[RANK, o], plan[RANK, c]
                else:
                    plan[RANK, c] = below(rng, num_ranks)
            else:
                c = 1 + below(rng, num - 1)
                at = plan[FIRST, c] + (1 if below(rng, 2) else -1)
                if plan[FIRST, c - 1] < at < plan[FIRST, c + 1]:
                    plan[FIRST, c] = at
        if ends_bound(plan, sums, load, ends, num_microbatches, delay) < now:
            return True
        plan[:KEY] = saved
    return False


@kernel
def repartition(
    plan: Array, strategy: Array, layers: Array, num_ranks: int, num_microbatches: int, delay: int, ranks_too: bool,
    goal: int, steps: int, rng: Array,
) -> int:  # fmt: skip
    """Anneal boundaries (and ranks) on loads alone, until the largest load + head + tail is at most ``goal``.

    Keys of chunks move with their places in a microbatch's pass, those with a spread by themselves. Returns the
    largest load + head + tail of the best
    that was found, which the plan then is.
    """
    num = plan[SCALARS, NUM_CHUNKS]
    if num < 2:
        return NEVER
    sums = np.zeros((3, len(strategy) + 1), np.int64)
    fillable = layer_sums(strategy, layers, sums)
    after = sums[1].copy()
    if fillable:
        sums[1, :] = 0
    load = np.zeros(num_ranks, np.int64)
    ends = np.zeros(num_ranks, np.int64)
    old = plan[: RANK + 1].copy()
    best = old.copy()
    now = ends_bound(plan, sums, load, ends, num_microbatches, delay)
    least = now
    heat = _HOT * now
    cooling = (_COLD / _HOT) ** (1.0 / steps)
    for _ in range(steps):
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
            kept = plan[FIRST, c]
            at = kept + (by if below(rng, 2) else -by)
            if at <= plan[FIRST, c - 1] or at >= plan[FIRST, c + 1]:
                continue
            plan[FIRST, c] = at
        elif kind <= 6:
            c = below(rng, num)
            o = below(rng, num)
            if plan[RANK, c] == plan[RANK, o]:
                continue
            plan[RANK, c], plan[RANK, o] = plan[RANK, o], plan[RANK, c]
        else:
            c = below(rng, num)
            kept = plan[RANK, c]
            plan[RANK, c] = below(rng, num_ranks)
        value = ends_bound(plan, sums, load, ends, num_microbatches, delay)
        if value <= now or uniform(rng) < np.exp((now - value) / heat):
            now = value
            if value < least:
                least = value
                best[:] = plan[: RANK + 1]
        elif kind <= 4:
            plan[FIRST, c] = kept
        elif kind <= 6:
            plan[RANK, c], plan[RANK, o] = plan[RANK, o], plan[RANK, c]
        else:
            plan[RANK, c] = kept
    plan[: RANK + 1] = best
    if plan[SCALARS, SPREAD] > 0:
        return int(least)
    for c in range(num):
        plan[KEY, c] += sums[0, plan[FIRST, c]] - sums[0, old[FIRST, c]]
        plan[KEY + 1, c] += after[old[FIRST, c + 1]] - after[plan[FIRST, c + 1]]
    return int(least)


@kernel
def exchange_layers(
    plan: Array, strategy: Array, layers: Array, num_ranks: int, most_chunks: int, num_microbatches: int, delay: int,
    limit: int, rng: Array,
) -> bool:  # fmt: skip
    """Let two or three single layers of different ranks change places, or two of one rank and one of another.

    Only where load + head + tail then stay below ``limit`` on every rank. A layer that leaves its chunk keeps the
    chunk's keys. Says whether that was found.
    """
    num = plan[SCALARS, NUM_CHUNKS]
    n = len(strategy)
    sums = np.zeros((3, n + 1), np.int64)
    if layer_sums(strategy, layers, sums):
        sums[1, :] = 0
    home = np.empty(n, np.int64)
    origin = np.empty(n, np.int64)
    load = np.zeros(num_ranks, np.int64)
    for c in range(num):
        for i in range(plan[FIRST, c], plan[FIRST, c + 1]):
            home[i] = plan[RANK, c]
            origin[i] = c
        load[plan[RANK, c]] += sums[2, plan[FIRST, c + 1]] - sums[2, plan[FIRST, c]]
    picked = np.empty(3, np.int64)
    to = np.empty(3, np.int64)
    for _ in range(_EXCHANGES):
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
            if fits and made <= most_chunks:
                _regroup(plan, home, origin)
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
    """Whether load + head + tail of every rank are below ``limit``."""
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


@kernel
def _regroup(plan: Array, home: Array, origin: Array) -> None:
    """Make chunks of the layers' ranks; each has the keys of the chunk that its layers came from."""
    old = plan[KEY:SCALARS].copy()
    num = 0
    n = len(home)
    for i in range(n):
        if i == 0 or home[i] != home[i - 1] or origin[i] != origin[i - 1]:
            plan[FIRST, num] = i
            plan[RANK, num] = home[i]
            for k in range(KEY, SCALARS):
                plan[k, num] = old[k - KEY, origin[i]]
            num += 1
    plan[FIRST, num] = n
    plan[SCALARS, NUM_CHUNKS] = num
