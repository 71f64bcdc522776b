"""Graphs with time reversed."""

from __future__ import annotations

import numpy as np

from pipeloom.taskgraph import BACKWARD, FORWARD, INPUT_GRADIENT, NO_TASK, Edges, Pairs, TaskGraph, Tasks, make_graph


def can_be_reversed(graph: TaskGraph) -> bool:
    """Return whether `reversed_graph` returns a graph."""
    return not ((graph.kind >= INPUT_GRADIENT).any() or graph.edge_bytes.any())


def reversed_graph(graph: TaskGraph) -> TaskGraph | None:
    """The graph with time running backwards: a schedule of it, mirrored, is one of the graph.

    A pair's backward becomes its forward, so pairs hold the same bytes meanwhile. None where that does not do:
    backwards that are split hold other bytes at their end, and bytes on edges are held from the end of one task
    to the end of the other.
    """
    if not can_be_reversed(graph):
        return None
    alone = graph.backward_of[graph.pair] == NO_TASK
    return make_graph(
        name=graph.name,
        num_ranks=graph.num_ranks,
        tasks=Tasks(
            kind=np.where((graph.kind == FORWARD) & ~alone, BACKWARD, FORWARD),
            rank=graph.rank,
            duration_ns=graph.duration_ns,
            pair=graph.pair,
            pass_id=graph.pass_id,
            microbatch=graph.microbatch,
            module=graph.module,
            module_names=graph.module_names,
        ),
        pairs=Pairs(activation_bytes=graph.activation_bytes, weight_gradient_bytes=graph.weight_gradient_bytes),
        edges=Edges(source=graph.edge_target, target=graph.edge_source, delay_ns=graph.edge_delay_ns),
        static_bytes=graph.static_bytes,
        capacity_bytes=graph.capacity_bytes,
    )
