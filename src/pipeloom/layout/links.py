"""Layouts by links that differ: which ranks are neighbours, and the same chunks on others, so that less is sent far.

Nothing here judges: layouts are compared as all others, by planning iterations with what messages take between the
ranks on which they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import msgspec
import numpy as np

from pipeloom.cost import CostModel, link_table
from pipeloom.cost.fits import FloatArray
from pipeloom.spec import Layout
from pipeloom.taskgraph.build import number_runs

_TYPICAL_BYTES = 1 << 20


def rank_distances(costs: CostModel, num_ranks: int) -> FloatArray:
    """Seconds of a message of typical size between any two ranks, shape (num_ranks, num_ranks)."""
    table = link_table(costs, num_ranks)
    seconds = np.array([costs.transfer_s(_TYPICAL_BYTES, link) for link in range(int(table.max()) + 1)])[table]
    np.fill_diagonal(seconds, 0.0)
    return seconds


def links_differ(distances: FloatArray) -> bool:
    """Whether it matters which ranks are neighbours."""
    apart = distances[~np.eye(len(distances), dtype=bool)]
    return bool(apart.size and (apart != apart[0]).any())


def neighbours(distances: FloatArray) -> tuple[int, ...]:
    """Order the ranks so that each is close to the next: the order they have, where no other is shorter.

    From every rank in turn the closest that is left is next.
    """
    ranks = range(len(distances))
    best, shortest = tuple(ranks), _length(distances, ranks)
    for first in ranks:
        order, left = [first], set(ranks) - {first}
        while left:
            order.append(min(left, key=lambda rank: (distances[order[-1], rank], rank)))
            left.discard(order[-1])
        length = _length(distances, order)
        if length < shortest * (1 - 1e-9):
            best, shortest = tuple(order), length
    return best


def _length(distances: FloatArray, order: Sequence[int]) -> float:
    return float(sum(distances[a, b] for a, b in pairwise(order)))


def on_ranks(layout: Layout, order: Sequence[int]) -> Layout:
    """The same layout with what was on rank ``r`` on rank ``order[r]``."""
    if tuple(order) == tuple(range(layout.num_ranks)):
        return layout
    # A replicated module has a chunk for each rank, in order.
    whole = {module.name for module in layout.modules if module.on_ranks == "replicated"}
    chunks = (c if c.module in whole else msgspec.structs.replace(c, rank=order[c.rank]) for c in layout.chunks)
    return msgspec.structs.replace(layout, chunks=tuple(chunks))


def closer(layout: Layout, distances: FloatArray) -> Iterator[tuple[str, Layout]]:
    """Yield the layout with its chunks on other ranks, as many on each: names and layouts.

    Of the passes that its chunks make over the ranks every second one goes back, so that none begins far from where
    the one before has ended. Or the passes are made over each group of close ranks, one group after the other.
    """
    pipelined = [i for i, c in enumerate(layout.chunks) if layout.module(c.module).on_ranks == "pipelined"]
    # Neighbouring chunks on one rank stay together.
    stages = [list(stage) for _, stage in groupby(pipelined, key=lambda i: layout.chunks[i].rank)]
    ranks = [layout.chunks[stage[0]].rank for stage in stages]
    numbers = number_runs(ranks)
    if not ranks or numbers[-1] == 0:
        return
    passes = [[r for r, run in zip(ranks, numbers, strict=True) if run == number] for number in range(numbers[-1] + 1)]
    back = [r for number, each in enumerate(passes) for r in (each[::-1] if number % 2 else each)]
    in_turn = [r for group in _groups(distances) for each in passes for r in each if r in group]
    for name, other in (("there and back", back), ("group by group", in_turn)):
        if other != ranks:
            chunks = list(layout.chunks)
            for stage, rank in zip(stages, other, strict=True):
                for place in stage:
                    chunks[place] = msgspec.structs.replace(chunks[place], rank=rank)
            yield name, msgspec.structs.replace(layout, chunks=tuple(chunks))


def _groups(distances: FloatArray) -> list[set[int]]:
    """Ranks that are close to one another: nearer than half way from the shortest distance to the longest."""
    apart = distances[~np.eye(len(distances), dtype=bool)]
    near = distances <= np.sqrt(apart.min() * apart.max())
    groups: list[set[int]] = []
    for rank in range(len(distances)):
        home = next((group for group in groups if all(near[rank, other] for other in group)), None)
        if home is None:
            groups.append({rank})
        else:
            home.add(rank)
    return groups
