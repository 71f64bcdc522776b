"""Evaluate a placement under a rule: typed wrappers of the kernels."""

from __future__ import annotations

import numpy as np

from pipeloom.layout.cooptimize.kernels.draft import ChainArrays
from pipeloom.layout.cooptimize.kernels.evaluate import Scratch
from pipeloom.layout.cooptimize.kernels.evaluate import evaluate as evaluate_draft
from pipeloom.layout.cooptimize.kernels.run import NEVER, ChunkSums, RunState
from pipeloom.layout.cooptimize.layer_chain import LayerChain, PartitionPlacement, graph_of
from pipeloom.layout.cooptimize.rules import PriorityRule, to_draft
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule


def arrays_of(chain: LayerChain, most_chunks: int | None = None) -> ChainArrays:
    """Convert a chain for the kernels. By default, ``most_chunks`` is the number of layers."""
    same = ("forward_ns", "backward_ns", "weight_ns", "activation_bytes", "gradient_bytes", "static_bytes", "end_ns")
    return ChainArrays(
        **{name: np.ascontiguousarray(getattr(chain, name)) for name in same},
        num_strategies=np.array([len(row) for row in chain.strategies], dtype=np.int64),
        capacity_bytes=chain.headroom_bytes,
        num_microbatches=chain.num_microbatches,
        delay_ns=chain.delay_ns,
        stride_ns=chain.stride_ns,
        most_chunks=chain.num_layers if most_chunks is None else most_chunks,
    )


def make_scratch(arrays: ChainArrays) -> Scratch:
    """Allocate the scratch arrays of one thread."""
    num_ranks = len(arrays.capacity_bytes)
    width = arrays.most_chunks + 2

    def by_rank() -> IntArray:
        return np.zeros(num_ranks, np.int64)

    def by_chunk(*rows: int) -> IntArray:
        return np.zeros((*rows, width), np.int64)

    sums = ChunkSums(
        duration=by_chunk(3),
        key=by_chunk(3),
        held=by_chunk(2),
        split=by_chunk(),
        hop=by_chunk(),
        slack=by_rank(),
        load=by_rank(),
        head=by_rank(),
        tail=by_rank(),
        ending=by_rank(),
    )
    state = RunState(
        end=np.zeros((2, max(1, arrays.most_chunks) * arrays.num_microbatches), np.int64),
        done=by_chunk(3),
        ready=by_chunk(3),
        now_key=by_chunk(3),
        admitted=by_chunk(),
        listed=by_chunk(),
        row=np.zeros(num_ranks + 1, np.int64),
        free=by_rank(),
        wake=by_rank(),
        left=by_rank(),
    )
    return Scratch(sums, state)


class Judge:
    """Evaluate many placements of one chain and count them."""

    def __init__(self, chain: LayerChain, most_chunks: int) -> None:
        self.arrays = arrays_of(chain, most_chunks)
        self.evaluations = 0
        self._scratch = make_scratch(self.arrays)
        self._none = np.empty(0, np.int64)

    def ns(
        self, placement: PartitionPlacement, rule: PriorityRule, cutoff: int = NEVER, record: IntArray | None = None
    ) -> int:
        """Return the end of the iteration in ns, or `NEVER` if memory or ``cutoff`` rules it out.

        ``record`` is passed to `kernels.run`.
        """
        self.evaluations += 1
        draft = to_draft(placement, rule, self.arrays.most_chunks)
        written = self._none if record is None else record
        return int(evaluate_draft(draft, self.arrays, self._scratch, cutoff, written))


def evaluate(chain: LayerChain, placement: PartitionPlacement, rule: PriorityRule, cutoff: int = NEVER) -> int:
    """Return the end of the iteration in ns, or `NEVER` if memory or ``cutoff`` rules the placement out."""
    return Judge(chain, placement.num_chunks).ns(placement, rule, cutoff)


def schedule_of(
    chain: LayerChain, placement: PartitionPlacement, rule: PriorityRule, *, method: str = ""
) -> tuple[TaskGraph, Schedule]:
    """Return the task graph of a placement and the schedule that the rule gives.

    Raises
    ------
    ValueError
        When the memory limit rules the placement out.
    """
    num, m = placement.num_chunks, chain.num_microbatches
    record = np.full(3 * num * m, -1, np.int64)
    if Judge(chain, num).ns(placement, rule, NEVER, record) >= NEVER:
        raise ValueError("one microbatch of each chunk does not fit on some rank")
    graph = graph_of(chain, placement)
    codes = record[record >= 0]
    # Codes number weight gradients of all chunks, tasks only those of chunks that have them.
    split = np.zeros(num, bool)
    split[np.unique(graph.pair[graph.kind == 3] // m)] = True
    number = np.full(3 * num * m, -1, np.int64)
    exists = np.concatenate([np.ones(2 * num, bool), split]).repeat(m)
    number[exists] = np.arange(exists.sum())
    tasks = number[codes]
    home = graph.rank[tasks]
    order = tuple(tasks[home == rank] for rank in range(chain.num_ranks))
    candidate = None if graph.candidates is None else np.ones(graph.num_pairs, np.int64)
    return graph, Schedule(order, candidate, method)
