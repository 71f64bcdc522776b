"""Where the joint search starts: interleaved and zigzag placements under a few simple rules."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeloom.arrange.cuts import balanced_cuts, equal_cuts, settled_cuts, stage_cuts
from pipeloom.arrange.layer_chain import Arrangement, LayerChain, chunk_costs
from pipeloom.arrange.rules import Rule
from pipeloom.arrange.timetables import folded_starts
from pipeloom.taskgraph import IntArray

_ONCE = 16
"""Spread of keys that is a lone microbatch's times."""
_FARTHER = (2, 3)
"""Times that spread. Later chunks then run older microbatches, so that unlike chunks keep each other supplied."""
MANY_RANKS = 16
"""Beyond, annealing moves too few boundaries to balance the loads itself; starts need the best there is."""


def interleaved(num_chunks: int, num_ranks: int) -> tuple[int, ...]:
    """Chunk j on rank j mod p."""
    return tuple(j % num_ranks for j in range(num_chunks))


def zigzag(num_chunks: int, num_ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again, so that turns are two chunks on one rank (V with two chunks a rank, wave)."""
    there = range(num_ranks)
    lap = [*there, *reversed(there)]
    return tuple(lap[j % len(lap)] for j in range(num_chunks))


def natural_keys(chain: LayerChain, arrangement: Arrangement, stride: int, early: float) -> IntArray:
    """Keys in the order in which a lone microbatch would meet its tasks, backwards ``early`` strides sooner."""
    costs = chunk_costs(chain, arrangement)
    forward = np.concatenate([[0], np.cumsum(costs.forward_ns)])
    after = costs.backward_ns[::-1].cumsum()[::-1] - costs.backward_ns
    backward = forward[-1] + after - int(early * stride)
    weight = np.full(len(after), stride * chain.num_microbatches * 4, dtype=np.int64)
    return np.stack([forward[:-1], backward, weight]).astype(np.int64)


def starts(chain: LayerChain, most_chunks: int, stride: int) -> Iterator[tuple[Arrangement, Rule]]:
    """Every placement with every simple rule, few chunks first; before them, with many ranks, the one by timetable."""
    p, m = chain.num_ranks, chain.num_microbatches
    if p > MANY_RANKS and most_chunks >= 2 * p and chain.num_layers >= p:
        yield from folded_starts(chain, stride)
    loads = chain.total_ns[:, 0]
    for depth in range(1, max(1, most_chunks // p) + 1):
        num = min(depth * p, chain.num_layers, most_chunks)
        found = set()
        for ranks in (interleaved(num, p), zigzag(num, p)):
            cuts = balanced_cuts(loads, ranks)
            found.add(Arrangement(cuts, ranks))
            if p > MANY_RANKS:
                found.add(Arrangement(settled_cuts(loads, ranks, cuts), ranks))
            if num > p:
                # One layer on each rank first, so that all ranks begin and end early.
                found.add(Arrangement(balanced_cuts(loads, ranks, p), ranks))
        if num == p > MANY_RANKS:
            found.add(Arrangement(stage_cuts(chain), interleaved(p, p)))
        for arrangement in sorted(found, key=lambda a: (a.cuts, a.ranks)):
            waits = np.zeros((3, num), np.int64)
            # With many ranks, more forwards first keep unlike stages from waiting for each other.
            for early in (0.0, float(p), 4.0 * m, *((-float(p),) if p > MANY_RANKS else ())):
                for period in sorted({1, min(p, m), min(2 * p, m)}):
                    yield arrangement, Rule(_even_keys(num, m, stride, early), waits, period, spread=_ONCE)
            for times in _FARTHER:
                for early in (0.0, p / 4, p / 2):
                    yield arrangement, Rule(_even_keys(num, m, stride, early), waits, spread=times * _ONCE)


def _even_keys(num_chunks: int, num_microbatches: int, stride: int, early: float) -> IntArray:
    """Keys to which those of a lone microbatch are added, backwards ``early`` strides sooner."""
    keys = np.zeros((3, num_chunks), np.int64)
    keys[1] = -int(early * stride)
    keys[2] = stride * num_microbatches * 4
    return keys


def allowed_starts(
    chain: LayerChain, most_chunks: int, stride: int, phases: tuple[str, ...]
) -> Iterator[tuple[Arrangement, Rule]]:
    """Give the starts that tuning these phases alone may use; see `pipeloom.arrange.Settings`."""
    p = chain.num_ranks
    for arrangement, rule in starts(chain, most_chunks, stride):
        num = arrangement.num_chunks
        if "placement" not in phases and arrangement.ranks != tuple(range(num)):
            continue
        even = equal_cuts(chain, num)
        if "partition" not in phases:
            if arrangement.cuts != balanced_cuts(chain.total_ns[:, 0], arrangement.ranks):
                continue  # of every placement and rule, one with equal layers
            arrangement = Arrangement(even, arrangement.ranks)
        if "schedule" not in phases:
            if rule.period != min(p, chain.num_microbatches):
                continue
            keys = natural_keys(chain, arrangement, stride, 4.0 * chain.num_microbatches)
            rule = Rule(keys, np.zeros_like(keys), rule.period)
        yield arrangement, rule
