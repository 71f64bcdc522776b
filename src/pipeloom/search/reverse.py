"""Graphs with time reversed."""

from __future__ import annotations

import numpy as np

from pipeloom.taskgraph import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    KIND_NAMES,
    NO_TASK,
    Edges,
    Pairs,
    TaskGraph,
    Tasks,
    make_graph,
)


def reversed_graph(graph: TaskGraph) -> TaskGraph | None:
    """Return the graph with time reversed. A mirrored schedule of it is a schedule of the original graph.

    The backward of a pair becomes its forward, so pairs hold the same bytes between their tasks. Return None if
    backwards are split, because they hold other bytes at their end, or if edges hold bytes, because these are held from
    the end of one task to the end of the other.
    """
    if (graph.kind >= INPUT_GRADIENT).any() or graph.edge_bytes.any():
        return None
    alone = graph.backward_of[graph.pair] == NO_TASK
    kind = np.where((graph.kind == FORWARD) & ~alone, BACKWARD, FORWARD)
    # The pairs of a forward segment may have backwards or not; each kind is a segment of its own.
    pass_id = np.unique(graph.pass_id * len(KIND_NAMES) + kind, return_inverse=True)[1]
    return make_graph(
        name=graph.name,
        num_ranks=graph.num_ranks,
        tasks=Tasks(
            kind=kind,
            rank=graph.rank,
            duration_ns=graph.duration_ns,
            pair=graph.pair,
            pass_id=pass_id,
            microbatch=graph.microbatch,
            module=graph.module,
            module_names=graph.module_names,
        ),
        pairs=Pairs(activation_bytes=graph.activation_bytes, weight_gradient_bytes=graph.weight_gradient_bytes),
        edges=Edges(source=graph.edge_target, target=graph.edge_source, delay_ns=graph.edge_delay_ns),
        static_bytes=graph.static_bytes,
        capacity_bytes=graph.capacity_bytes,
    )
