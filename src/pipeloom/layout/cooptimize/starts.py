"""Starts of the joint search: interleaved and zigzag placements under a few simple rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from pipeloom.layout.cooptimize.cuts import balanced_cuts, equal_cuts, from_zero, settled_cuts, stage_cuts
from pipeloom.layout.cooptimize.layer_chain import LayerChain, PartitionPlacement, chunk_costs
from pipeloom.layout.cooptimize.params import CooptimizeParams
from pipeloom.layout.cooptimize.rules import PriorityRule
from pipeloom.layout.cooptimize.timetables import folded_starts
from pipeloom.taskgraph import IntArray

ONCE = 16
"""Spread of keys that corresponds to the times of a single microbatch."""
_HELD_SHARES = (0.25, 0.5, 0.75, 1.0)
_WHOLE = 10**9
"""Sum of the mixed loads of all layers."""


def interleaved(num_chunks: int, num_ranks: int) -> tuple[int, ...]:
    """Place chunk j on rank j mod p."""
    return tuple(j % num_ranks for j in range(num_chunks))


def zigzag(num_chunks: int, num_ranks: int) -> tuple[int, ...]:
    """Place chunks down the ranks and up again, with two chunks on the rank of each turn (V, wave)."""
    there = range(num_ranks)
    lap = [*there, *reversed(there)]
    return tuple(lap[j % len(lap)] for j in range(num_chunks))


def natural_keys(chain: LayerChain, placement: PartitionPlacement, stride: int, early: float) -> IntArray:
    """Return keys in the task order of a single microbatch, with backwards ``early`` strides earlier."""
    costs = chunk_costs(chain, placement)
    forward = from_zero(costs.forward_ns)
    after = costs.backward_ns[::-1].cumsum()[::-1] - costs.backward_ns
    backward = forward[-1] + after - int(early * stride)
    weight = np.full(len(after), stride * chain.num_microbatches * 4, dtype=np.int64)
    return np.stack([forward[:-1], backward, weight]).astype(np.int64)


def loads_to_cut_by(chain: LayerChain) -> Iterator[IntArray]:
    """Yield loads by which a chain is cut: first times, then mixtures with increasing weight on the static bytes.

    The mixtures are for memory limits under which no cut by times fits.
    """
    seconds = chain.total_ns[:, 0]
    yield seconds
    held = chain.static_bytes
    if chain.capacity_bytes is None or not held.any():
        return
    for share in _HELD_SHARES:
        mixed = (1 - share) * seconds / max(1, seconds.sum()) + share * held / held.sum()
        yield np.rint(mixed * _WHOLE).astype(np.int64)


def starts(
    chain: LayerChain, loads: IntArray, most_chunks: int, stride: int, params: CooptimizeParams
) -> Iterator[tuple[PartitionPlacement, PriorityRule]]:
    """Yield every placement with every simple rule, few chunks first. With many ranks, timetables come first."""
    p = chain.num_ranks
    many = p > params.starts.many_ranks
    if many and most_chunks >= 2 * p and chain.num_layers >= p:
        yield from folded_starts(chain, stride, params.timetables)
    for depth in range(1, max(1, most_chunks // p) + 1):
        num = min(depth * p, chain.num_layers, most_chunks)
        found = set()
        for ranks in (interleaved(num, p), zigzag(num, p)):
            cuts = balanced_cuts(loads, ranks)
            found.add(PartitionPlacement(cuts, ranks))
            if many:
                found.add(PartitionPlacement(settled_cuts(loads, ranks, cuts), ranks))
            if num > p:
                # The first chunk of each rank has one layer, so that all ranks begin and end early.
                found.add(PartitionPlacement(balanced_cuts(loads, ranks, p), ranks))
        if many and num == p:
            found.add(PartitionPlacement(stage_cuts(chain), interleaved(p, p)))
        for placement in sorted(found, key=lambda a: (a.cuts, a.ranks)):
            for rule in _simple_rules(chain, num, stride, params):
                yield placement, rule


def _simple_rules(chain: LayerChain, num_chunks: int, stride: int, params: CooptimizeParams) -> Iterator[PriorityRule]:
    """Yield the simple rules for a number of chunks."""
    p, m = chain.num_ranks, chain.num_microbatches
    waits = np.zeros((3, num_chunks), np.int64)
    # With many ranks, more forwards first reduce the waiting between unequal stages.
    for early in (0.0, float(p), 4.0 * m, *((-float(p),) if p > params.starts.many_ranks else ())):
        for period in sorted({1, min(p, m), min(2 * p, m)}):
            yield PriorityRule(_even_keys(num_chunks, m, stride, early), waits, period, spread=ONCE)
    for times in params.starts.spreads:
        for early in (0.0, p / 4, p / 2):
            yield PriorityRule(_even_keys(num_chunks, m, stride, early), waits, spread=times * ONCE)


def _even_keys(num_chunks: int, num_microbatches: int, stride: int, early: float) -> IntArray:
    """Return keys to which those of a single microbatch are added, with backwards ``early`` strides earlier."""
    keys = np.zeros((3, num_chunks), np.int64)
    keys[1] = -int(early * stride)
    keys[2] = stride * num_microbatches * 4
    return keys


def allowed_starts(
    chain: LayerChain, loads: IntArray, most_chunks: int, stride: int, params: CooptimizeParams
) -> Iterator[tuple[PartitionPlacement, PriorityRule]]:
    """Yield the starts that are allowed by `pipeloom.layout.cooptimize.CooptimizeParams.tuned`."""
    for placement, rule in starts(chain, loads, most_chunks, stride, params):
        if "partition" not in params.tuned:
            if placement.cuts != balanced_cuts(loads, placement.ranks):
                continue  # one start with equal layers for every placement and rule
            placement = PartitionPlacement(equal_cuts(chain, placement.num_chunks), placement.ranks)
        yield from _if_allowed(chain, placement, rule, stride, params)


def starts_at(
    chain: LayerChain, placements: Iterable[PartitionPlacement | None], stride: int, params: CooptimizeParams
) -> Iterator[tuple[PartitionPlacement, PriorityRule]]:
    """Yield the allowed starts with placements that were made for the memory limit, under every simple rule."""
    if "partition" not in params.tuned:
        return
    for placement in dict.fromkeys(placements):
        if placement is not None:
            for rule in _simple_rules(chain, placement.num_chunks, stride, params):
                yield from _if_allowed(chain, placement, rule, stride, params)


def _if_allowed(
    chain: LayerChain, placement: PartitionPlacement, rule: PriorityRule, stride: int, params: CooptimizeParams
) -> Iterator[tuple[PartitionPlacement, PriorityRule]]:
    """Yield a start unless its placement or rule may not be tuned; replace rules that are fixed."""
    if "placement" not in params.tuned and placement.ranks != tuple(range(placement.num_chunks)):
        return
    if "schedule" not in params.tuned:
        if rule.period != min(chain.num_ranks, chain.num_microbatches):
            return
        keys = natural_keys(chain, placement, stride, 4.0 * chain.num_microbatches)
        rule = PriorityRule(keys, np.zeros_like(keys), rule.period)
    yield placement, rule
