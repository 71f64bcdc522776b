"""Which chunks gather parameters and reduce gradients, in an order that all replicas share whatever their plans."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.spec import Layout


@dataclass(frozen=True, slots=True)
class CollectiveOrder:
    """Chunk numbers of one rank, in the order of their collectives.

    Attributes
    ----------
    unshard : tuple of int
        UN: where there are replicas, every chunk, as a forward comes to them.
    reduce : tuple of int
        RG: trained chunks that exist several times, as a backward comes to them. A chunk without work in an
        iteration is reduced too: other replicas wait for its share.
    """

    unshard: tuple[int, ...]
    reduce: tuple[int, ...]


def collective_order(layout: Layout, rank: int) -> CollectiveOrder:
    """Order of a rank's collectives: decided by the layout alone."""
    several = layout.parallelism.data > 1
    unshard, reduce = [], []
    for number, chunk in enumerate(layout.chunks):
        if chunk.rank != rank:
            continue
        module = layout.module(chunk.module)
        if several:
            unshard.append(number)
        everywhere = module.on_ranks == "replicated" and layout.num_ranks > 1
        if (several or everywhere) and not module.frozen:
            reduce.append(number)
    return CollectiveOrder(tuple(unshard), tuple(reversed(reduce)))
