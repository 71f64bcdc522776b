"""Priority rules, which choose the next task of a rank, and their conversion to and from drafts of the kernels."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pipeloom.layout.cooptimize.kernels.draft import (
    FIRST,
    KEY,
    LIMIT,
    NUM_CHUNKS,
    NUM_ROWS,
    PERIOD,
    RANK,
    SCALARS,
    SPREAD,
    UNLIMITED,
    WAIT,
    Draft,
)
from pipeloom.layout.cooptimize.layer_chain import LayerChain, PartitionPlacement, chunk_costs, rank_work_ns
from pipeloom.search.rule import ChunkRule, OrderRule
from pipeloom.taskgraph import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class PriorityRule:
    """A rule that chooses the next task of a rank; see ``docs/cooptimize.md``.

    Attributes
    ----------
    keys : array, shape (3, num_chunks)
        Keys of F, B or I, and W. The task with the lowest key runs first.
    waits : array, shape (3, num_chunks)
        Maximum time that a rank waits for a task of the chunk, in ns.
    period : int
        Number of consecutive microbatches that share a key.
    limits : array, shape (num_chunks,), or None
        Maximum number of microbatches of a chunk between F and B or I, at least 1. None: limited by memory only.
    spread : int
        Sixteenths of the starts of F and B or I of a single microbatch that are added to their keys, so that keys adapt
        when layers move.
    """

    keys: IntArray
    waits: IntArray
    period: int = 1
    limits: IntArray | None = None
    spread: int = 0


def to_draft(placement: PartitionPlacement, rule: PriorityRule, most_chunks: int) -> Draft:
    """Convert a placement and its rule into arrays that the kernels change."""
    num, num_layers = placement.num_chunks, placement.cuts[-1]
    chunks = np.zeros((NUM_ROWS, most_chunks + 2), np.int64)
    chunks[FIRST, : num + 1] = placement.cuts
    chunks[RANK, :num] = placement.ranks
    chunks[KEY : KEY + 3, :num] = rule.keys
    chunks[WAIT : WAIT + 3, :num] = rule.waits
    chunks[LIMIT, :num] = UNLIMITED if rule.limits is None else rule.limits
    chunks[SCALARS, NUM_CHUNKS] = num
    chunks[SCALARS, PERIOD] = rule.period
    chunks[SCALARS, SPREAD] = rule.spread
    return Draft(chunks, np.array(placement.strategies or (0,) * num_layers, dtype=np.int64))


def from_draft(draft: Draft) -> tuple[PartitionPlacement, PriorityRule]:
    """Convert a draft into a placement and its rule."""
    chunks, strategy = draft.chunks, draft.strategy
    num = int(chunks[SCALARS, NUM_CHUNKS])
    placement = PartitionPlacement(
        cuts=tuple(int(x) for x in chunks[FIRST, : num + 1]),
        ranks=tuple(int(x) for x in chunks[RANK, :num]),
        strategies=tuple(int(s) for s in strategy) if strategy.any() else (),
    )
    rule = PriorityRule(
        keys=chunks[KEY : KEY + 3, :num].copy(),
        waits=chunks[WAIT : WAIT + 3, :num].copy(),
        period=int(chunks[SCALARS, PERIOD]),
        limits=chunks[LIMIT, :num].copy() if chunks[LIMIT, :num].min() < UNLIMITED else None,
        spread=int(chunks[SCALARS, SPREAD]),
    )
    return placement, rule


def copy_of(draft: Draft) -> Draft:
    """Return a deep copy of a draft."""
    return Draft(draft.chunks.copy(), draft.strategy.copy())


def cut_at(
    placement: PartitionPlacement, rule: PriorityRule, boundaries: Collection[int]
) -> tuple[PartitionPlacement, PriorityRule]:
    """Split chunks at the layers in ``boundaries``. Both parts keep their rank and keys."""
    cuts = sorted({*placement.cuts, *boundaries})
    of = np.searchsorted(placement.cuts, cuts[:-1], side="right") - 1
    limits = None if rule.limits is None else rule.limits[of]
    cut = replace(placement, cuts=tuple(cuts), ranks=tuple(placement.ranks[i] for i in of))
    return cut, replace(rule, keys=rule.keys[:, of], waits=rule.waits[:, of], limits=limits)


def order_rule(chain: LayerChain, placement: PartitionPlacement, rule: PriorityRule) -> OrderRule:
    """Convert a rule into an `OrderRule`: without units of time, and with ``spread`` included in the keys."""
    unit = chain.stride_ns
    # Waits are scaled by the task times under the strategies. Of keys, only the order matters.
    whole = float(rank_work_ns(chain, placement).sum()) / chain.num_ranks or 1.0
    costs = chunk_costs(chain, placement)
    hop = np.array([chain.delay_ns * (a != b) for a, b in pairwise(placement.ranks)] + [0], np.int64)
    # Starts of each forward and backward of a single microbatch, as in `kernels.evaluate`: a backward begins when the
    # later ones are complete and their gradients have arrived.
    before = np.cumsum(costs.forward_ns + hop) - costs.forward_ns - hop
    after = np.cumsum((costs.backward_ns + hop)[::-1])[::-1] - costs.backward_ns
    lone = int(before[-1] + costs.forward_ns[-1]) + after
    keys = rule.keys + np.stack([before, lone, np.zeros_like(lone)]) * rule.spread // 16
    names: tuple[str, ...] = ()
    if placement.strategies:
        names = tuple(row[index] for row, index in zip(chain.strategies, placement.strategies, strict=True))
    limits = [UNLIMITED] * placement.num_chunks if rule.limits is None else rule.limits.tolist()
    return OrderRule(
        tuple(
            ChunkRule(
                layers=(first, end - 1),
                rank=placement.ranks[c],
                forward=float(keys[0, c]) / unit,
                backward=float(keys[1, c]) / unit,
                weight=float(keys[2, c]) / unit,
                forward_wait=float(rule.waits[0, c]) / whole,
                backward_wait=float(rule.waits[1, c]) / whole,
                limit=None if limits[c] >= UNLIMITED else limits[c],
                strategies=names[first:end],
            )
            for c, (first, end) in enumerate(pairwise(placement.cuts))
        ),
        rule.period,
    )
