"""Placements for unequal links: the order of ranks, and the same chunks on other ranks with faster links.

This module only proposes layouts. They are compared by planning iterations with the message times between their ranks.
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
    """Return the seconds of a typical message between any two ranks, shape (num_ranks, num_ranks)."""
    table = link_table(costs, num_ranks)
    seconds = np.array([costs.transfer_s(_TYPICAL_BYTES, link) for link in range(int(table.max()) + 1)])[table]
    np.fill_diagonal(seconds, 0.0)
    return seconds


def links_differ(distances: FloatArray) -> bool:
    """Return whether links between ranks differ."""
    apart = distances[~np.eye(len(distances), dtype=bool)]
    return bool(apart.size and (apart != apart[0]).any())


def neighbors(distances: FloatArray) -> tuple[int, ...]:
    """Order the ranks so that each is close to the next. The current order is kept if no other is shorter.

    A nearest-neighbor tour is tried from every rank.
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
    """Return the layout with the chunks of rank ``r`` on rank ``order[r]``."""
    if tuple(order) == tuple(range(layout.num_ranks)):
        return layout
    # A replicated module has a chunk for each rank, in order.
    whole = {module.name for module in layout.modules if module.on_ranks == "replicated"}
    chunks = (c if c.module in whole else msgspec.structs.replace(c, rank=order[c.rank]) for c in layout.chunks)
    return msgspec.structs.replace(layout, chunks=tuple(chunks))


def closer(layout: Layout, distances: FloatArray) -> Iterator[tuple[str, Layout]]:
    """Yield names and layouts with the chunks on other ranks, the same number on each rank.

    Either every second pass over the ranks is reversed, so that each pass starts close to the end of the previous one,
    or the passes are made over each group of close ranks in turn.
    """
    pipelined = [i for i, c in enumerate(layout.chunks) if layout.module(c.module).on_ranks == "pipelined"]
    # Adjacent chunks on one rank stay together.
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
    """Group ranks whose distances are at most the geometric mean of the shortest and the longest distance."""
    apart = distances[~np.eye(len(distances), dtype=bool)]
    close = distances <= np.sqrt(apart.min() * apart.max())
    groups: list[set[int]] = []
    for rank in range(len(distances)):
        home = next((group for group in groups if all(close[rank, other] for other in group)), None)
        if home is None:
            groups.append({rank})
        else:
            home.add(rank)
    return groups
