"""A small pipeline to compile kernels before they are needed."""

from __future__ import annotations

from itertools import pairwise

from pipeloom.taskgraph import BACKWARD, FORWARD, Edges, PairLabel, Pairs, TaskGraph, Tasks, make_graph

_FORWARD_NS, _BACKWARD_NS, _ACTIVATION_BYTES = 1000, 2000, 100


def small_pipeline(num_ranks: int, num_microbatches: int, *, capacity: bool = False) -> TaskGraph:
    """Return the graph of one module with one chunk per rank and equal microbatches.

    Parameters
    ----------
    capacity : bool
        Whether memory is limited to ``num_ranks`` microbatches.
    """
    kind: list[int] = []
    rank: list[int] = []
    pair: list[int] = []
    pass_id: list[int] = []
    microbatch: list[int] = []
    edges: list[tuple[int, int]] = []
    labels = []
    for m in range(num_microbatches):
        first = len(kind)
        places = list(range(num_ranks))
        kind += [FORWARD] * num_ranks + [BACKWARD] * num_ranks
        rank += places + places[::-1]
        pair += [m * num_ranks + place for place in places + places[::-1]]
        pass_id += [2 * m] * num_ranks + [2 * m + 1] * num_ranks
        microbatch += [m] * 2 * num_ranks
        edges += pairwise(range(first, len(kind)))
        labels += [PairLabel(place, m, 0) for place in places]
    num_pairs = num_ranks * num_microbatches
    return make_graph(
        name="example",
        num_ranks=num_ranks,
        tasks=Tasks(
            kind=kind,
            rank=rank,
            duration_ns=[_FORWARD_NS if k == FORWARD else _BACKWARD_NS for k in kind],
            pair=pair,
            pass_id=pass_id,
            microbatch=microbatch,
            module=[0] * len(kind),
            module_names=("lm",),
        ),
        pairs=Pairs(activation_bytes=[_ACTIVATION_BYTES] * num_pairs, weight_gradient_bytes=None, labels=tuple(labels)),
        edges=Edges(
            source=[source for source, _ in edges], target=[target for _, target in edges], delay_ns=[0] * len(edges)
        ),
        capacity_bytes=[num_ranks * _ACTIVATION_BYTES] * num_ranks if capacity else None,
    )
