"""Compiled loops of packing: greedy placement, and local search between bins.

A sample has a number of tokens, which the budget limits, and one or more loads, which are balanced. The height of a bin
is the largest of its loads, in units of the mean bin's load.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.compiled import Array, allocating, kernel
from pipeloom.compiled.random import below
from pipeloom.packing.tree_kernels import add_to, first_of_most, first_with, lowest_with, put, width

NEAREST = 24
"""Most bins with which one bin exchanges: all bins of small batches, near-linear time in large ones."""
MOST_EXCHANGED = 256
"""Most samples of a bin that are tried in an exchange: all samples of small bins."""


class Bins(NamedTuple):
    """Samples in bins. ``bin_of`` is the bin of every sample.

    ``loads`` has shape (num_dimensions, num_samples). ``height`` and ``used`` are the sums of loads and tokens of every
    bin. Its samples form a list from ``first`` on, linked by ``after`` and ``before``; -1 ends the list.
    """

    tokens: Array
    loads: Array
    budget: int
    bin_of: Array
    height: Array
    used: Array
    first: Array
    after: Array
    before: Array


@kernel
def next_fit(order: Array, tokens: Array, budget: int, bin_of: Array) -> int:
    """Fill one bin after the other in the given order; return the number of bins."""
    current = 0
    used = 0
    for i in order:
        if used + tokens[i] > budget and used > 0:
            current += 1
            used = 0
        bin_of[i] = current
        used += tokens[i]
    return current + 1


@allocating
def first_fit(order: Array, tokens: Array, budget: int, bin_of: Array) -> int:
    """Put each sample into the first bin with enough free tokens; return the number of bins."""
    size = width(len(order))
    # Bins that are not open yet have no free tokens.
    free = np.full(2 * size, -1, np.int64)
    count = 0
    for i in order:
        place = first_with(free, tokens[i])
        if place < 0:
            place = count
            put(free, place, budget)
            count += 1
        bin_of[i] = place
        put(free, place, free[size + place] - tokens[i])
    return count


@allocating
def lightest_fit(order: Array, tokens: Array, loads: Array, budget: int, opened: int, limit: int, bin_of: Array) -> int:
    """Put each sample into the bin that fits it and is lowest with it; open more than ``opened`` bins if none fits.

    ``loads`` has shape (dimensions, samples). Returns the number of bins, or -1 if more than ``limit`` are needed.
    """
    size = width(limit)
    free, height = np.full(2 * size, -1, np.int64), np.zeros((loads.shape[0], 2 * size), np.float64)
    for b in range(opened):
        put(free, b, budget)
    stack = np.empty(128, np.int64)
    count = opened
    for i in order:
        place = lowest_with(free, height, tokens[i], loads, i, stack)
        if place < 0:
            if count == limit:
                return -1
            place = count
            put(free, place, budget)
            count += 1
        bin_of[i] = place
        put(free, place, free[size + place] - tokens[i])
        add_to(height, place, loads, i)
    return count


@kernel
def _height(height: Array, b: int) -> float:
    top = 0.0
    for d in range(height.shape[0]):
        top = max(top, height[d, b])
    return top


@kernel
def _after(height: Array, loads: Array, b: int, gone: int, come: int) -> float:
    """Return the height of a bin after one sample leaves (-1: none) and one is added."""
    top = 0.0
    for d in range(height.shape[0]):
        value = height[d, b]
        if gone >= 0:
            value -= loads[d, gone]
        if come >= 0:
            value += loads[d, come]
        top = max(top, value)
    return top


@kernel
def _link(bins: Bins, i: int, b: int) -> None:
    """Add a sample to a bin that is in no other."""
    bins.before[i] = -1
    bins.after[i] = bins.first[b]
    if bins.first[b] >= 0:
        bins.before[bins.first[b]] = i
    bins.first[b] = i
    bins.bin_of[i] = b
    bins.used[b] += bins.tokens[i]
    for d in range(bins.height.shape[0]):
        bins.height[d, b] += bins.loads[d, i]


@kernel
def _best_exchange(bins: Bins, h: int, b: int, ceiling: float) -> tuple[float, int, int]:
    """Return the move or swap that leaves the higher of two bins lowest, below ``ceiling``: (height, out, in)."""
    tokens, loads, budget = bins.tokens, bins.loads, bins.budget
    height, used, first, after = bins.height, bins.used, bins.first, bins.after
    best = ceiling
    best_out = -1
    best_in = -1
    i = first[h]
    tried = 0
    while i >= 0 and tried < MOST_EXCHANGED:
        tried += 1
        if used[b] + tokens[i] <= budget:
            top = max(_after(height, loads, h, i, -1), _after(height, loads, b, -1, i))
            if top < best:
                best, best_out, best_in = top, i, -1
        j = first[b]
        others = 0
        while j >= 0 and others < MOST_EXCHANGED:
            others += 1
            if used[b] - tokens[j] + tokens[i] <= budget and used[h] - tokens[i] + tokens[j] <= budget:
                top = _after(height, loads, h, i, j)
                if top < best:
                    top = max(top, _after(height, loads, b, j, i))
                    if top < best:
                        best, best_out, best_in = top, i, j
            j = after[j]
        i = after[i]
    return best, best_out, best_in


@kernel
def _move(bins: Bins, i: int, source: int, target: int) -> None:
    before, after = bins.before[i], bins.after[i]
    if before >= 0:
        bins.after[before] = after
    else:
        bins.first[source] = after
    if after >= 0:
        bins.before[after] = before
    bins.used[source] -= bins.tokens[i]
    for d in range(bins.height.shape[0]):
        bins.height[d, source] -= bins.loads[d, i]
    _link(bins, i, target)


@kernel
def _exchange(bins: Bins, h: int, b: int, out: int, come: int) -> None:
    _move(bins, out, h, b)
    if come >= 0:
        _move(bins, come, b, h)


@allocating
def _gather(tokens: Array, loads: Array, budget: int, num_bins: int, bin_of: Array) -> Bins:
    n = len(tokens)
    height, used = np.zeros((loads.shape[0], num_bins), np.float64), np.zeros(num_bins, np.int64)
    first, after, before = np.full(num_bins, -1, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    bins = Bins(tokens, loads, budget, bin_of, height, used, first, after, before)
    for i in range(n):
        _link(bins, i, bin_of[i])
    return bins


@kernel
def _note(height: Array, b: int, tops: Array, depths: Array) -> None:
    """Write a bin's height and its negative into trees of maxima."""
    top = _height(height, b)
    put(tops, b, top)
    put(depths, b, -top)


@kernel
def _lightest(depths: Array, ranked: Array, kept: Array) -> None:
    """Write the lightest bins into ``ranked``, the lightest first; ``kept`` is a buffer of the same length."""
    size = len(depths) // 2
    for k in range(len(ranked)):
        ranked[k] = first_of_most(depths)
        kept[k] = depths[size + ranked[k]]
        put(depths, ranked[k], -np.inf)
    for k in range(len(ranked)):
        put(depths, ranked[k], kept[k])


@allocating
def level(
    tokens: Array, loads: Array, budget: int, num_bins: int, goal: float, effort: int, seed: int, bin_of: Array
) -> float:
    """Lower the highest bin by moves and swaps; return its height. Works in place on ``bin_of``.

    The highest bin exchanges samples with light bins while that helps. If it does not, two other bins exchange samples
    at random below the present height, and the highest bin tries again with these. Search ends after ``effort`` random
    exchanges, or when the highest bin is as low as ``goal``.
    """
    state = np.full(1, np.uint64(seed) * np.uint64(2) + np.uint64(0x9E3779B97F4A7C15), np.uint64)
    n = len(tokens)
    bins = _gather(tokens, loads, budget, num_bins, bin_of)
    height, used = bins.height, bins.used
    size = width(num_bins)
    tops, depths = np.full(2 * size, -np.inf), np.full(2 * size, -np.inf)
    for b in range(num_bins):
        _note(height, b, tops, depths)
    if num_bins < 2:
        return float(tops[size])
    ranked: Array = np.empty(min(NEAREST, num_bins), np.int64)
    kept = np.empty(NEAREST, np.float64)
    _lightest(depths, ranked, kept)
    stale = 0
    tries = 0
    while True:
        h = first_of_most(tops)
        if tops[1] <= goal or tries >= effort:
            return float(tops[1])
        if stale >= 16:
            _lightest(depths, ranked, kept)
            stale = 0
        stale += 1
        ceiling = tops[1] * (1 - 1e-9)
        best = ceiling
        best_bin = -1
        best_out = -1
        best_in = -1
        for b in ranked:
            if b == h:
                continue
            top, out, come = _best_exchange(bins, h, b, best)
            if out >= 0:
                best, best_bin, best_out, best_in = top, b, out, come
        # Perturbation: a random exchange between two other bins that both stay below the highest.
        while best_bin < 0 and tries < effort:
            tries += 1
            i = below(state, n)
            j = below(state, n)
            b, c = bin_of[i], bin_of[j]
            if b == c or h in (b, c):
                continue
            if used[b] - tokens[i] + tokens[j] > budget or used[c] - tokens[j] + tokens[i] > budget:
                continue
            if max(_after(height, loads, b, i, j), _after(height, loads, c, j, i)) >= ceiling:
                continue
            _exchange(bins, b, c, i, j)
            _note(height, b, tops, depths)
            _note(height, c, tops, depths)
            for other in (b, c):
                top, out, come = _best_exchange(bins, h, other, best)
                if out >= 0:
                    best, best_bin, best_out, best_in = top, other, out, come
        if best_bin >= 0:
            _exchange(bins, h, best_bin, best_out, best_in)
            _note(height, h, tops, depths)
            _note(height, best_bin, tops, depths)


@kernel
def _short(count: int, devices: int) -> int:
    """Return the distance of a number from multiples of the devices: 0 at one, largest halfway to the next.

    It is concave, so moving one bin toward its multiple below and another toward its multiple above lowers the sum.
    """
    rest = count % devices
    return rest * (devices - rest)


@kernel
def _best_filling(
    bins: Bins, h: int, b: int, bar: int, under: float, ceiling: float, devices: int, instances: Array, count: Array
) -> tuple[int, float, int, int]:
    """Return the move or swap that brings two bins closest to multiples: (gain, height of the higher bin, out, in).

    It must gain more than ``bar``, or exactly ``bar`` and leave the bins lower than ``under``.
    """
    tokens, loads, budget = bins.tokens, bins.loads, bins.budget
    height, used, first, after = bins.height, bins.used, bins.first, bins.after
    best, least = bar, under
    best_out = best_in = -1
    now = _short(count[h], devices) + _short(count[b], devices)
    i = first[h]
    tried = 0
    while i >= -1:
        # The last iteration removes no sample; the last inner one adds none.
        out = i
        tried += 1
        i = -2 if out < 0 else after[out] if tried < MOST_EXCHANGED else -1
        j = first[b]
        others = 0
        while j >= -1:
            come = j
            others += 1
            j = -2 if come < 0 else after[come] if others < MOST_EXCHANGED else -1
            moved = (instances[out] if out >= 0 else 0) - (instances[come] if come >= 0 else 0)
            gain = now - _short(count[h] - moved, devices) - _short(count[b] + moved, devices)
            if gain <= 0 or gain < best:
                continue
            tokens_moved = (tokens[out] if out >= 0 else 0) - (tokens[come] if come >= 0 else 0)
            if used[h] - tokens_moved > budget or used[b] + tokens_moved > budget:
                continue
            top = max(_after(height, loads, h, out, come), _after(height, loads, b, come, out))
            if top <= ceiling and (gain > best or top < least):
                best, least, best_out, best_in = gain, top, out, come
    return best, least, best_out, best_in


@kernel
def _next_short(short: Array, count: Array, devices: int, b: int) -> int:
    """Return the first bin from ``b`` on whose instances are not a multiple of the devices, or the number of bins."""
    found = b
    while found < len(count) and (short[found] > found or count[found] % devices == 0):
        found = max(found + 1, short[found])
    while b < found:
        after = max(b + 1, short[b])
        short[b] = found
        b = after
    return found


@allocating
def fill(
    tokens: Array,
    loads: Array,
    instances: Array,
    devices: int,
    budget: int,
    num_bins: int,
    uneven: float,
    bin_of: Array,
) -> None:
    """Make every bin's instances a multiple of the devices as far as possible, by moves and swaps.

    Works in place on ``bin_of``. No bin rises above ``uneven`` and the highest bin; ``loads`` are in units of the
    mean bin's load.
    """
    bins = _gather(tokens, loads, budget, num_bins, bin_of)
    count = np.zeros(num_bins, np.int64)
    for i in range(len(tokens)):
        count[bin_of[i]] += instances[i]
    ceiling = uneven
    for b in range(num_bins):
        ceiling = max(ceiling, _height(bins.height, b))
    # For each bin, the next bin at or after it that may be short. Bins that are not short stay so.
    short = np.arange(num_bins + 1)
    changed = True
    while changed:
        changed = False
        for h in range(num_bins):
            while count[h] % devices:
                gain, least, best_bin, best_out, best_in = 0, np.inf, -1, -1, -1
                b = h
                for _ in range(NEAREST):
                    b = _next_short(short, count, devices, b + 1)
                    if b == num_bins:
                        b = _next_short(short, count, devices, 0)
                    if b == h:
                        break
                    found, top, out, come = _best_filling(bins, h, b, gain, least, ceiling, devices, instances, count)
                    if out >= 0 or come >= 0:
                        gain, least, best_bin, best_out, best_in = found, top, b, out, come
                if best_bin < 0:
                    break
                changed = True
                for sample, source, target in ((best_out, h, best_bin), (best_in, best_bin, h)):
                    if sample >= 0:
                        _move(bins, sample, source, target)
                        count[source] -= instances[sample]
                        count[target] += instances[sample]


def compile_kernels() -> None:
    """Compile the loops that the policies use, for their array types."""
    two = np.arange(2, dtype=np.int64)
    tokens, loads, bin_of = np.ones(2, np.int64), np.ones((1, 2)), np.zeros(2, np.int64)
    next_fit(two, tokens, 2, bin_of)
    first_fit(two, tokens, 2, bin_of)
    lightest_fit(two, tokens, loads, 2, 2, 2, bin_of)
    level(tokens, loads, 2, 2, 0.0, 1, 0, bin_of)
    fill(tokens, loads, two, 2, 2, 2, 1.0, bin_of)
