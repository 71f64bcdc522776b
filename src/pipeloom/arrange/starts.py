"""Where the joint search starts: interleaved and zigzag placements under a few simple rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeloom.arrange.cuts import balanced_cuts, equal_cuts, settled_cuts, stage_cuts
from pipeloom.arrange.kernels import FIRST, KEY, NUM_CHUNKS, NUM_ROWS, PERIOD, RANK, SCALARS, WAIT
from pipeloom.arrange.layer_chain import Arrangement, LayerChain, chunk_costs
from pipeloom.taskgraph import IntArray

_MANY_RANKS = 16
"""Beyond, annealing moves too few boundaries to balance the loads itself; starts need the best there is."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """Which task a rank takes next; see ``docs/arrange.md``.

    Attributes
    ----------
    keys : array, shape (3, num_chunks)
        Rows F, B or I, W: the least key goes first.
    waits : array, shape (3, num_chunks)
        How long a rank may wait for a task of the chunk, in ns.
    period : int
        How many microbatches take turns before the next ones come.
    """

    keys: IntArray
    waits: IntArray
    period: int = 1


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
    """Every placement with every simple rule, few chunks first."""
    p, m = chain.num_ranks, chain.num_microbatches
    loads = chain.total_ns[:, 0]
    for depth in range(1, max(1, most_chunks // p) + 1):
        num = min(depth * p, chain.num_layers, most_chunks)
        found = set()
        for ranks in (interleaved(num, p), zigzag(num, p)):
            cuts = balanced_cuts(loads, ranks)
            found.add(Arrangement(cuts, ranks))
            if p > _MANY_RANKS:
                found.add(Arrangement(settled_cuts(loads, ranks, cuts), ranks))
            if num > p:
                # One layer on each rank first, so that all ranks begin and end early.
                found.add(Arrangement(balanced_cuts(loads, ranks, p), ranks))
        if num == p > _MANY_RANKS:
            found.add(Arrangement(stage_cuts(chain), interleaved(p, p)))
        for arrangement in sorted(found, key=lambda a: (a.cuts, a.ranks)):
            waits = np.zeros((3, num), np.int64)
            # With many ranks, more forwards first keep unlike stages from waiting for each other.
            for early in (0.0, float(p), 4.0 * m, *((-float(p),) if p > _MANY_RANKS else ())):
                keys = natural_keys(chain, arrangement, stride, early)
                for period in sorted({1, min(p, m), min(2 * p, m)}):
                    yield arrangement, Rule(keys, waits, period)


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


def to_plan(arrangement: Arrangement, rule: Rule, most_chunks: int) -> IntArray:
    """Write an arrangement and its rule as the array that the kernels change."""
    num = arrangement.num_chunks
    plan = np.zeros((NUM_ROWS, most_chunks + 2), np.int64)
    plan[FIRST, : num + 1] = arrangement.cuts
    plan[RANK, :num] = arrangement.ranks
    plan[KEY : KEY + 3, :num] = rule.keys
    plan[WAIT : WAIT + 3, :num] = rule.waits
    plan[SCALARS, NUM_CHUNKS] = num
    plan[SCALARS, PERIOD] = rule.period
    return plan


def from_plan(plan: IntArray, strategy: IntArray) -> tuple[Arrangement, Rule]:
    """Read a plan back."""
    num = int(plan[SCALARS, NUM_CHUNKS])
    chosen = tuple(int(s) for s in strategy) if strategy.any() else ()
    arrangement = Arrangement(
        tuple(int(x) for x in plan[FIRST, : num + 1]), tuple(int(x) for x in plan[RANK, :num]), chosen
    )
    keys, waits = plan[KEY : KEY + 3, :num].copy(), plan[WAIT : WAIT + 3, :num].copy()
    return arrangement, Rule(keys, waits, int(plan[SCALARS, PERIOD]))
