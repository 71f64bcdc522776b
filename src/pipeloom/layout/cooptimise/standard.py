"""Standard placements of a chain: the ones that others run, and by which memory is measured."""

from __future__ import annotations

from pipeloom.layout.cooptimise.cuts import equal_cuts
from pipeloom.layout.cooptimise.layer_chain import LayerChain, PartitionPlacement, graph_of
from pipeloom.layout.cooptimise.starts import interleaved, zigzag
from pipeloom.search import one_f_one_b
from pipeloom.taskgraph import IntArray
from pipeloom.timeline import simulate


def stages(chain: LayerChain) -> PartitionPlacement:
    """One stage of equally many layers on each rank (S-1F1B, GPipe, zero-bubble H)."""
    p = chain.num_ranks
    return PartitionPlacement(equal_cuts(chain, p), tuple(range(p)))


def round_robin(chain: LayerChain, chunks_per_rank: int) -> PartitionPlacement:
    """Chunks of equally many layers dealt to the ranks in turn (I-1F1B)."""
    num = chunks_per_rank * chain.num_ranks
    return PartitionPlacement(equal_cuts(chain, num), interleaved(num, chain.num_ranks))


def wave(chain: LayerChain, chunks_per_rank: int = 2) -> PartitionPlacement:
    """Chunks of equally many layers down the ranks and up again (V with two a rank; Hanayo's waves with more)."""
    num = chunks_per_rank * chain.num_ranks
    return PartitionPlacement(equal_cuts(chain, num), zigzag(num, chain.num_ranks))


def one_f_one_b_peaks(chain: LayerChain) -> IntArray:
    """Bytes that 1F1B on equal stages holds on every rank at most, static ones included."""
    graph = graph_of(chain.with_capacity(None), stages(chain))
    return simulate(graph, one_f_one_b(graph)).peak_bytes


def in_memory_of_1f1b(chain: LayerChain, factor: float = 1.0) -> LayerChain:
    """Limit every rank to so many times what 1F1B on equal stages holds on its fullest one."""
    return chain.with_capacity(int(factor * int(one_f_one_b_peaks(chain).max())))
