"""Standard placements of a chain, used by other systems and as a reference for memory."""

from __future__ import annotations

from pipeloom.layout.cooptimize.cuts import equal_cuts
from pipeloom.layout.cooptimize.layer_chain import LayerChain, PartitionPlacement, graph_of
from pipeloom.layout.cooptimize.starts import interleaved, zigzag
from pipeloom.search import one_f_one_b
from pipeloom.taskgraph import IntArray
from pipeloom.timeline import simulate


def stages(chain: LayerChain) -> PartitionPlacement:
    """Place one stage with an equal number of layers on each rank (S-1F1B, GPipe, zero-bubble H)."""
    p = chain.num_ranks
    return PartitionPlacement(equal_cuts(chain, p), tuple(range(p)))


def round_robin(chain: LayerChain, chunks_per_rank: int) -> PartitionPlacement:
    """Place chunks with equal numbers of layers on the ranks in turn (I-1F1B)."""
    num = chunks_per_rank * chain.num_ranks
    return PartitionPlacement(equal_cuts(chain, num), interleaved(num, chain.num_ranks))


def wave(chain: LayerChain, chunks_per_rank: int = 2) -> PartitionPlacement:
    """Place chunks with equal numbers of layers down the ranks and up again (V with two per rank, Hanayo with more)."""
    num = chunks_per_rank * chain.num_ranks
    return PartitionPlacement(equal_cuts(chain, num), zigzag(num, chain.num_ranks))


def one_f_one_b_peaks(chain: LayerChain, placement: PartitionPlacement | None = None) -> IntArray:
    """Return the peak bytes of every rank under 1F1B, static bytes included; ``placement`` None: with equal stages."""
    graph = graph_of(chain.with_capacity(None), placement or stages(chain))
    return simulate(graph, one_f_one_b(graph)).peak_bytes


def in_memory_of_1f1b(chain: LayerChain, factor: float = 1.0) -> LayerChain:
    """Limit the memory of every rank to ``factor`` times the highest peak of 1F1B with equal stages."""
    return chain.with_capacity(int(factor * int(one_f_one_b_peaks(chain).max())))
