"""A small pipeline to compile kernels before they are needed."""

from __future__ import annotations

import numpy as np

from pipeloom.taskgraph import BACKWARD, FORWARD, Edges, PairLabel, Pairs, TaskGraph, Tasks, make_graph

_FORWARD_NS, _BACKWARD_NS, _ACTIVATION_BYTES = 1000, 2000, 100


def small_pipeline(num_ranks: int, num_microbatches: int, *, capacity: bool = False) -> TaskGraph:
    """Return the graph of one module with one chunk per rank and equal microbatches.

    ``capacity`` limits the memory to ``num_ranks`` microbatches.
    """
    there_and_back = [*range(num_ranks), *reversed(range(num_ranks))]
    rank = np.tile(there_and_back, num_microbatches)
    kind = np.tile(np.repeat([FORWARD, BACKWARD], num_ranks), num_microbatches)
    microbatch = np.repeat(np.arange(num_microbatches), 2 * num_ranks)
    chained = np.flatnonzero(np.diff(microbatch) == 0)
    num_pairs = num_ranks * num_microbatches
    return make_graph(
        name="example",
        num_ranks=num_ranks,
        tasks=Tasks(
            kind=kind,
            rank=rank,
            duration_ns=np.where(kind == FORWARD, _FORWARD_NS, _BACKWARD_NS),
            pair=microbatch * num_ranks + rank,
            pass_id=2 * microbatch + (kind == BACKWARD),
            microbatch=microbatch,
            module=np.zeros_like(kind),
            module_names=("lm",),
        ),
        pairs=Pairs(
            activation_bytes=np.full(num_pairs, _ACTIVATION_BYTES),
            labels=tuple(PairLabel(place, m, 0) for m in range(num_microbatches) for place in range(num_ranks)),
        ),
        edges=Edges(source=chained, target=chained + 1, delay_ns=np.zeros_like(chained)),
        capacity_bytes=np.full(num_ranks, num_ranks * _ACTIVATION_BYTES) if capacity else None,
    )
