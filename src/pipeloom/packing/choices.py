"""Candidate packings: the same samples in more or fewer microbatches, and with other sub-microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from pipeloom.packing.loads import Loads
from pipeloom.packing.policies import (
    PackingSpec,
    assign_bins,
    balances,
    fill_shares,
    group,
    least_microbatches,
    open_missing,
    samples_of_bins,
)
from pipeloom.spec import Layout

Groups = tuple[tuple[int, ...], ...]
"""Positions of the samples of each microbatch."""

SLOWER = 1.01
"""A packing that is slower than the best by this factor is a miss; see `walk`."""
_GROWTH = 1.16
"""Ratio of successive numbers of microbatches in `numbers`."""
_LEVEL_EFFORT = 16
_LEVEL_GOAL = 1.01
"""Balance that suffices to compare numbers of microbatches: height of the highest bin over the lower bound."""
_FILLED_SAMPLES = (1, 2)
"""Sizes of full microbatches, in units of the longest sample."""


def numbers(loads: Loads, spec: PackingSpec) -> tuple[int, ...]:
    """Return the numbers of microbatches worth trying, ascending, from the fewest the budget allows to one per sample.

    If few samples share a microbatch, a number that leaves some microbatches with one sample more is needlessly uneven.
    It is replaced by the fewest microbatches with the same largest number of samples. With encoder data parallelism,
    each microbatch should also have a multiple of the devices as instances.
    """
    least, most = least_microbatches(loads, spec), len(loads)
    steps = [least]
    while steps[-1] < most:
        steps.append(min(most, max(steps[-1] + 1, round(steps[-1] * _GROWTH))))
    even = {max(least, -(-most // -(-most // number))) for number in steps}
    return tuple(sorted({min(most, max(least, _full_shares(loads, number))) for number in even}))


def _full_shares(loads: Loads, number: int) -> int:
    """Return the nearest number of microbatches whose mean number of instances is a multiple of the devices."""
    if loads.instances is None:
        return number
    total = int(loads.instances.sum())
    each = round(total / loads.num_devices / number)
    return number if each < 1 else -(-total // (each * loads.num_devices))


def walk(choices: Sequence[int], start: int, slower: float, misses: int, judge: Callable[[int], float | None]) -> None:
    """Evaluate ascending choices from the one nearest to ``start``, upwards and downwards, while they are not slower.

    The first pass doubles and halves the choice and stops at the first slower one, since time may allow only a few. The
    second pass goes step by step from the best choice so far.

    Parameters
    ----------
    slower : float
        A choice that takes more than this multiple of the least time so far is a miss.
    misses : int
        Stop in one direction after this many consecutive misses.
    judge : callable
        Return the time of a choice, or None to end the walk.
    """
    known: dict[int, float] = {}

    def time_of(i: int) -> float | None:
        if i not in known:
            took = judge(choices[i])
            if took is None:
                return None
            known[i] = took
        return known[i]

    middle = min(range(len(choices)), key=lambda i: abs(choices[i] - start))
    if time_of(middle) is None:
        return
    for stride, most_missed in ((_doubled, 1), (_next, misses)):
        middle = min(known, key=lambda i: known[i])
        for way in (1, -1):
            i, missed = middle, 0
            while missed < most_missed and 0 <= (i := stride(choices, i, way)) < len(choices):
                least = min(known.values())
                took = time_of(i)
                if took is None:
                    return
                missed = missed + 1 if took > slower * least else 0


def _next(_choices: Sequence[int], i: int, way: int) -> int:
    return i + way


def _doubled(choices: Sequence[int], i: int, way: int) -> int:
    """Return the position of twice or half a choice, or the last position before the end."""
    beyond = [j for j in range(len(choices)) if choices[max(i, j)] >= 2 * choices[min(i, j)] and (j - i) * way > 0]
    last = len(choices) - 1 if way > 0 else 0
    if not beyond:
        return last if i != last else last + way
    return min(beyond) if way > 0 else max(beyond)


def even_microbatches(loads: Loads, spec: PackingSpec, number: int, iteration: int = 0) -> Groups:
    """Divide the samples into this many microbatches, or a few more if the token budget needs them.

    Balances the backbone's load and the total load quickly, since samples may be moved later. A policy that does not
    balance divides them in its own way.
    """
    if not balances(spec.policy):
        return group(loads, msgspec.structs.replace(spec, num_microbatches=number), iteration)
    bins = assign_bins(loads.tokens, loads.rows, spec.token_budget, number, spec.seed, _LEVEL_EFFORT, _LEVEL_GOAL)
    fill_shares(loads, spec.token_budget, bins)
    return samples_of_bins(open_missing(bins, loads, spec))


def multiples(loads: Loads, spec: PackingSpec, unit: int | None = None, usual: int | None = None) -> Iterator[Groups]:
    """Yield packings whose microbatches hold one, two, ... times the longest sample's tokens (PipeTune).

    With ``usual``, those with about as many microbatches come first.
    """
    longest = int(loads.tokens.max())
    # Without tokens, one packing with the whole budget is enough.
    unit = unit or longest or spec.token_budget
    sizes = [k * unit for k in range(1, spec.token_budget // unit + 1) if k * unit >= longest]
    if usual is not None:
        total = int(loads.tokens.sum())
        sizes.sort(key=lambda size: abs(total / size - usual))
    for size in sizes or [spec.token_budget]:
        yield group(loads, msgspec.structs.replace(spec, token_budget=size))


def filled_microbatches(loads: Loads, spec: PackingSpec) -> Iterator[Groups]:
    """Yield packings with full microbatches and a light last one, which shortens warm-up and cool-down."""
    if not balances(spec.policy):
        return
    longest = max(1, int(loads.tokens.max()))
    for samples in _FILLED_SAMPLES:
        if samples * longest <= spec.token_budget:
            filled = msgspec.structs.replace(spec, token_budget=samples * longest, policy="algorithm1_opened")
            yield group(loads, filled)


def sub_microbatch_variants(layout: Layout) -> Iterator[Layout]:
    """Yield the layout with the sub-microbatches of one module halved, doubled or not split."""
    for i, module in enumerate(layout.modules):
        size = module.sub_microbatch
        if size is None:
            continue
        for other in (max(1, size // 2), 2 * size, None):
            if other != size:
                changed = msgspec.structs.replace(module, sub_microbatch=other)
                yield msgspec.structs.replace(layout, modules=(*layout.modules[:i], changed, *layout.modules[i + 1 :]))
