"""Packings to choose from: the same samples in more and fewer microbatches, and cut into other sub-microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from pipeloom.packing.loads import Loads
from pipeloom.packing.policies import (
    PackingSpec,
    Policy,
    assign_bins,
    fill_shares,
    group,
    groups_of,
    least_microbatches,
)
from pipeloom.spec import Layout

Groups = tuple[tuple[int, ...], ...]
"""Positions of the samples of every microbatch."""

_GROWTH = 1.16
"""From one number of microbatches to the next that is tried."""
_LEVEL_EFFORT = 16
_LEVEL_GOAL = 1.01
"""Even enough to compare numbers of microbatches by."""
_BALANCED: tuple[Policy, ...] = ("balanced", "balanced_encoder", "planned")
"""Policies that even a given number of microbatches out."""
_FILLED_SAMPLES = (1, 2)
"""Sizes of full microbatches, in longest samples."""


def balances(policy: Policy) -> bool:
    """Whether a policy evens a given number of microbatches out; samples may then be moved between them."""
    return policy in _BALANCED


def numbers(loads: Loads, spec: PackingSpec) -> tuple[int, ...]:
    """Numbers of microbatches worth trying, ascending: as few as the budget allows, up to one for each sample.

    Where few samples share a microbatch, a number that leaves some of them with one more than others need is uneven for
    nothing: the fewest with as many samples at most are tried in its place. So it is with dealt instances, of which
    every microbatch had better have a multiple of the devices.
    """
    least, most = least_microbatches(loads, spec), len(loads)
    found = [least]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, round(found[-1] * _GROWTH))))
    even = {max(least, -(-most // -(-most // number))) for number in found}
    return tuple(sorted({min(most, max(least, _full_shares(loads, number))) for number in even}))


def _full_shares(loads: Loads, number: int) -> int:
    """The nearest number of microbatches in which dealt instances are as many for all devices, in the mean."""
    if loads.instances is None:
        return number
    total = int(loads.instances.sum())
    each = round(total / loads.num_devices / number)
    return number if each < 1 else -(-total // (each * loads.num_devices))


def walk(ladder: Sequence[int], start: int, slower: float, misses: int, judge: Callable[[int], float | None]) -> None:
    """Judge rungs of a ladder from one of them on, upwards and then downwards, until several are clearly slower.

    First in doublings, for which one that is slower is enough, since time may allow no more than a few; then, from the
    best of these, rung by rung.

    Parameters
    ----------
    ladder : sequence of int
        Ascending.
    start : int
        The first that is judged is the nearest to it.
    slower : float
        A rung that takes more than so many times the least so far is a miss.
    misses : int
        So many one after the other end a way.
    judge : callable
        What a rung takes; None: judge no more.
    """
    known: dict[int, float] = {}

    def judged(i: int) -> float | None:
        if i not in known:
            took = judge(ladder[i])
            if took is None:
                return None
            known[i] = took
        return known[i]

    middle = min(range(len(ladder)), key=lambda i: abs(ladder[i] - start))
    if judged(middle) is None:
        return
    for stride, most_missed in ((_doubled, 1), (_next, misses)):
        middle = min(known, key=lambda i: known[i])
        for way in (1, -1):
            i, missed = middle, 0
            while missed < most_missed and 0 <= (i := stride(ladder, i, way)) < len(ladder):
                least = min(known.values())
                took = judged(i)
                if took is None:
                    return
                missed = missed + 1 if took > slower * least else 0


def _next(_ladder: Sequence[int], i: int, way: int) -> int:
    return i + way


def _doubled(ladder: Sequence[int], i: int, way: int) -> int:
    """The rung at twice or half of another, or the last before the ladder ends."""
    far = [j for j in range(len(ladder)) if ladder[max(i, j)] >= 2 * ladder[min(i, j)] and (j - i) * way > 0]
    last = len(ladder) - 1 if way > 0 else 0
    if not far:
        return last if i != last else last + way
    return min(far) if way > 0 else max(far)


def even_groups(loads: Loads, spec: PackingSpec, number: int, iteration: int = 0) -> Groups:
    """The samples in so many microbatches, or a few more where the budget asks for it.

    Even in the backbone's load and in all load, quickly: samples may be moved later. A policy that does not balance
    makes them as it does.
    """
    if not balances(spec.policy):
        return group(loads, msgspec.structs.replace(spec, num_microbatches=number), iteration)
    bins = assign_bins(loads.tokens, loads.rows, spec.token_budget, number, spec.seed, _LEVEL_EFFORT, _LEVEL_GOAL)
    fill_shares(loads, spec.token_budget, bins)
    return groups_of(bins)


def multiples(loads: Loads, spec: PackingSpec, unit: int | None = None) -> Iterator[Groups]:
    """Packings into microbatches of once, twice, ... so many tokens (the longest sample's); PipeTune's choice."""
    longest = int(loads.tokens.max())
    unit = unit or longest
    sizes = [k * unit for k in range(1, spec.token_budget // unit + 1) if k * unit >= longest]
    for size in sizes or [spec.token_budget]:
        yield group(loads, msgspec.structs.replace(spec, token_budget=size))


def filled_groups(loads: Loads, spec: PackingSpec) -> Iterator[Groups]:
    """Full microbatches and a light rest, which fills and drains a pipeline well; not of a policy that is asked for."""
    if not balances(spec.policy):
        return
    longest = int(loads.tokens.max())
    for samples in _FILLED_SAMPLES:
        if samples * longest <= spec.token_budget:
            yield group(loads, PackingSpec(samples * longest, "algorithm1_opened"))


def cut_layouts(layout: Layout) -> Iterator[Layout]:
    """The same chunks with other sub-microbatches: of one module half or twice as large, or not cut at all."""
    for i, module in enumerate(layout.modules):
        size = module.sub_microbatch
        if size is None:
            continue
        for other in (max(1, size // 2), 2 * size, None):
            if other != size:
                changed = msgspec.structs.replace(module, sub_microbatch=other)
                yield msgspec.structs.replace(layout, modules=(*layout.modules[:i], changed, *layout.modules[i + 1 :]))
