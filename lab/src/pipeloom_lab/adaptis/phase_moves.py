"""Changes of one phase at a time, as AdaPtis tunes them (section 4.3, Fig. 6): transfers of layers, permutations of
stages, and where a schedule's bubbles come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipeloom.layout.cooptimize.layer_chain import PartitionPlacement
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Timeline

_NEAREST = 3
"""Pairs of chunks that are tried for a transfer between two ranks."""


@dataclass(frozen=True, slots=True)
class BubbleShares:
    """Where the mean rank's idle time comes from, in ns; the three add up to it."""

    partition: int
    """Ranks have less work than the fullest one."""
    placement: int
    """Ranks begin late and end early, beyond that."""
    schedule: int
    """Gaps between a rank's tasks."""


def bubble_shares(graph: TaskGraph, timeline: Timeline) -> BubbleShares:
    """Attribute idle time to the phases: uneven work first, then idle ends, then gaps."""
    num = graph.num_ranks
    load = np.zeros(num, np.int64)
    np.add.at(load, graph.rank, timeline.end_ns - timeline.start_ns)
    first, last = np.full(num, timeline.makespan_ns), np.zeros(num, np.int64)
    np.minimum.at(first, graph.rank, timeline.start_ns)
    np.maximum.at(last, graph.rank, timeline.end_ns)
    idle = timeline.makespan_ns - load
    uneven = load.max() - load
    ends = np.clip(first + timeline.makespan_ns - last, 0, None)
    ends = np.clip(ends - uneven, 0, idle - uneven)
    partition, placement = int(uneven.mean()), int(ends.mean())
    return BubbleShares(partition, placement, int(idle.mean()) - partition - placement)


def transfers(placement: PartitionPlacement, giver: int, taker: int) -> Iterator[PartitionPlacement]:
    """Hand one layer from one rank's chunk to another's, nearest pairs of chunks first.

    All chunks between the two hand a layer on and keep their number of layers.
    """
    cuts, ranks = placement.cuts, np.array(placement.ranks)
    pairs = [(a, b) for a in np.flatnonzero(ranks == giver) for b in np.flatnonzero(ranks == taker)]
    pairs.sort(key=lambda pair: (abs(pair[0] - pair[1]), pair))
    tried = 0
    for a, b in pairs:
        if cuts[a + 1] - cuts[a] < 2:
            continue
        moved = list(cuts)
        for at in range(a + 1, b + 1):
            moved[at] -= 1
        for at in range(b + 1, a + 1):
            moved[at] += 1
        yield PartitionPlacement(tuple(moved), placement.ranks, placement.strategies)
        tried += 1
        if tried == _NEAREST:
            return


def permutations(placement: PartitionPlacement, most_chunks: int) -> Iterator[PartitionPlacement]:
    """Place layers anew while every rank keeps its number of layers.

    First whole groups of stages: each rank's layers in 1, 2, ... pieces, assigned in turn (I-1F1B) or down and up
    (Hanayo). Then two neighbouring chunks in halves that alternate, and chunks of equal size that exchange ranks.
    """
    counts: dict[int, int] = {}
    for (first, last), rank in zip(pairwise(placement.cuts), placement.ranks, strict=True):
        counts[rank] = counts.get(rank, 0) + last - first
    seen = {(placement.cuts, placement.ranks)}
    for made in _all(placement, counts, most_chunks):
        if made.num_chunks <= most_chunks and (made.cuts, made.ranks) not in seen:
            seen.add((made.cuts, made.ranks))
            yield made


def _all(placement: PartitionPlacement, counts: dict[int, int], most_chunks: int) -> Iterator[PartitionPlacement]:
    order = tuple(counts)
    for pieces in range(1, max(1, most_chunks // len(order)) + 1):
        for up_and_down in (False, True):
            yield _in_pieces(placement, counts, order, pieces, up_and_down)
    cuts, ranks = placement.cuts, placement.ranks
    for c in range(placement.num_chunks - 1):
        first, middle, last = cuts[c : c + 3]
        if ranks[c] != ranks[c + 1] and middle - first > 1 and last - middle > 1:
            # Sizes stay with their ranks: half of one, half of the other, and again.
            a, b = (middle - first) // 2, (last - middle) // 2
            inner = (first + a, first + a + b, middle + b)
            yield PartitionPlacement(
                (*cuts[: c + 1], *inner, *cuts[c + 2 :]),
                (*ranks[:c], ranks[c], ranks[c + 1], ranks[c], ranks[c + 1], *ranks[c + 2 :]),
                placement.strategies,
            )
    sizes = np.diff(cuts)
    for a in range(placement.num_chunks):
        for b in range(a + 1, min(a + len(order) + 1, placement.num_chunks)):
            if ranks[a] != ranks[b] and sizes[a] == sizes[b]:
                swapped = list(ranks)
                swapped[a], swapped[b] = ranks[b], ranks[a]
                yield PartitionPlacement(cuts, tuple(swapped), placement.strategies)


def _in_pieces(
    placement: PartitionPlacement, counts: dict[int, int], order: Sequence[int], pieces: int, up_and_down: bool
) -> PartitionPlacement:
    cuts, ranks = [0], list[int]()
    for lap in range(pieces):
        for rank in reversed(order) if up_and_down and lap % 2 else order:
            size = counts[rank] * (lap + 1) // pieces - counts[rank] * lap // pieces
            if size:
                cuts.append(cuts[-1] + size)
                ranks.append(rank)
    return PartitionPlacement(tuple(cuts), tuple(ranks), placement.strategies).merged()


def shifts(num_chunks: int, ranks: IntArray, rank: int, step: int) -> Iterator[IntArray]:
    """Changes of the keys of F, B and W: advance and delay all of a rank, then single chunks of it."""
    mine = np.flatnonzero(ranks == rank).tolist()
    for chunks in (mine, *([c] for c in mine)):
        for kind in range(3):
            for by in (-step, step):
                change = np.zeros((3, num_chunks), np.int64)
                change[kind, chunks] = by
                yield change
        if len(mine) == 1:
            return
