"""Where the joint search starts: interleaved and zigzag placements under a few simple rules."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeloom.layout.cooptimise.cuts import balanced_cuts, equal_cuts, settled_cuts, stage_cuts
from pipeloom.layout.cooptimise.layer_chain import LayerChain, PartitionPlacement, chunk_costs
from pipeloom.layout.cooptimise.params import CooptimiseParams
from pipeloom.layout.cooptimise.rules import PriorityRule
from pipeloom.layout.cooptimise.timetables import folded_starts
from pipeloom.taskgraph import IntArray

ONCE = 16
"""Spread of keys that is a lone microbatch's times."""
_HELD_SHARES = (0.25, 0.5, 0.75, 1.0)
_WHOLE = 10**9
"""Of mixed loads, the sum of all layers."""


def interleaved(num_chunks: int, num_ranks: int) -> tuple[int, ...]:
    """Chunk j on rank j mod p."""
    return tuple(j % num_ranks for j in range(num_chunks))


def zigzag(num_chunks: int, num_ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again, so that turns are two chunks on one rank (V with two chunks a rank, wave)."""
    there = range(num_ranks)
    lap = [*there, *reversed(there)]
    return tuple(lap[j % len(lap)] for j in range(num_chunks))


def natural_keys(chain: LayerChain, placement: PartitionPlacement, stride: int, early: float) -> IntArray:
    """Keys in the order in which a lone microbatch would meet its tasks, backwards ``early`` strides sooner."""
    costs = chunk_costs(chain, placement)
    forward = np.concatenate([[0], np.cumsum(costs.forward_ns)])
    after = costs.backward_ns[::-1].cumsum()[::-1] - costs.backward_ns
    backward = forward[-1] + after - int(early * stride)
    weight = np.full(len(after), stride * chain.num_microbatches * 4, dtype=np.int64)
    return np.stack([forward[:-1], backward, weight]).astype(np.int64)


def loads_to_cut_by(chain: LayerChain) -> Iterator[IntArray]:
    """What layers weigh where a chain is cut: their time; and, for memory in which no such cut fits, more and more what
    they hold before training, which layers of little time may have most of.
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
    chain: LayerChain, loads: IntArray, most_chunks: int, stride: int, params: CooptimiseParams
) -> Iterator[tuple[PartitionPlacement, PriorityRule]]:
    """Every placement with every simple rule, few chunks first; before them, with many ranks, the one by timetable."""
    p, m = chain.num_ranks, chain.num_microbatches
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
                # One layer on each rank first, so that all ranks begin and end early.
                found.add(PartitionPlacement(balanced_cuts(loads, ranks, p), ranks))
        if many and num == p:
            found.add(PartitionPlacement(stage_cuts(chain), interleaved(p, p)))
        for placement in sorted(found, key=lambda a: (a.cuts, a.ranks)):
            waits = np.zeros((3, num), np.int64)
            # With many ranks, more forwards first keep unlike stages from waiting for each other.
            for early in (0.0, float(p), 4.0 * m, *((-float(p),) if many else ())):
                for period in sorted({1, min(p, m), min(2 * p, m)}):
                    yield placement, PriorityRule(_even_keys(num, m, stride, early), waits, period, spread=ONCE)
            for times in params.starts.spreads:
                for early in (0.0, p / 4, p / 2):
                    yield placement, PriorityRule(_even_keys(num, m, stride, early), waits, spread=times * ONCE)


def _even_keys(num_chunks: int, num_microbatches: int, stride: int, early: float) -> IntArray:
    """Keys to which those of a lone microbatch are added, backwards ``early`` strides sooner."""
    keys = np.zeros((3, num_chunks), np.int64)
    keys[1] = -int(early * stride)
    keys[2] = stride * num_microbatches * 4
    return keys


def allowed_starts(
    chain: LayerChain, loads: IntArray, most_chunks: int, stride: int, params: CooptimiseParams
) -> Iterator[tuple[PartitionPlacement, PriorityRule]]:
    """Give the starts that what is tuned leaves open (`pipeloom.layout.cooptimise.CooptimiseParams.tuned`)."""
    p = chain.num_ranks
    for placement, rule in starts(chain, loads, most_chunks, stride, params):
        num = placement.num_chunks
        if "placement" not in params.tuned and placement.ranks != tuple(range(num)):
            continue
        even = equal_cuts(chain, num)
        if "partition" not in params.tuned:
            if placement.cuts != balanced_cuts(loads, placement.ranks):
                continue  # of every placement and rule, one with equal layers
            placement = PartitionPlacement(even, placement.ranks)
        if "schedule" not in params.tuned:
            if rule.period != min(p, chain.num_microbatches):
                continue
            keys = natural_keys(chain, placement, stride, 4.0 * chain.num_microbatches)
            rule = PriorityRule(keys, np.zeros_like(keys), rule.period)
        yield placement, rule
