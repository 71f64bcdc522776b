"""Graphs that differ from another one in delays, edges, or one microbatch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError
from pipeloom.taskgraph.columns import IntArray, check_range
from pipeloom.taskgraph.graph import TaskGraph, topological_order
from pipeloom.taskgraph.rows import adjacency
from pipeloom.totals import summable


def with_delays(graph: TaskGraph, edge_delay_ns: IntArray) -> TaskGraph:
    """Return the graph with other edge delays, shape (num_edges,)."""
    edges = (graph.edge_source, graph.edge_target, edge_delay_ns)
    return replace(graph, edge_delay_ns=edge_delay_ns, **_rows(graph, edges))


def with_edges(
    graph: TaskGraph, source: npt.ArrayLike, target: npt.ArrayLike, delay_ns: npt.ArrayLike | int = 0
) -> TaskGraph:
    """Return the graph with additional edges, which hold no bytes.

    Raises
    ------
    InputError
        A task does not exist, or the edges form a cycle.
    """
    more_source, more_target = np.asarray(source, np.int64), np.asarray(target, np.int64)
    check_range("edges.source", more_source, graph.num_tasks)
    check_range("edges.target", more_target, graph.num_tasks)
    delay = np.broadcast_to(np.asarray(delay_ns, np.int64), more_source.shape)
    edges = (
        np.concatenate([graph.edge_source, more_source]),
        np.concatenate([graph.edge_target, more_target]),
        summable("edges.delay_s", np.concatenate([graph.edge_delay_ns, delay])),
    )
    held = np.concatenate([graph.edge_bytes, np.zeros(len(more_source), np.int64)])
    columns: dict[str, Any] = dict(zip(("edge_source", "edge_target", "edge_delay_ns"), edges, strict=True))
    changed = replace(graph, edge_bytes=held, **columns, **_rows(graph, edges))
    topological_order(changed)
    return changed


def with_microbatch(graph: TaskGraph, number: int, one: TaskGraph) -> TaskGraph:
    """Return the graph with the costs of another microbatch in the place of one.

    Parameters
    ----------
    graph : TaskGraph
        Graph of a layout, without candidates.
    number : int
        Microbatch to replace.
    one : TaskGraph
        Graph of the new microbatch alone, under the same layout and strategies.

    Raises
    ------
    InputError
        The new microbatch has other tasks or edges, for example another number of sub-microbatches.
    """
    tasks = np.flatnonzero(graph.microbatch == number)
    pairs = np.flatnonzero(graph.microbatch[graph.forward_of] == number)
    edges = np.flatnonzero(graph.microbatch[graph.edge_target] == number)
    first = int(tasks[0]) if len(tasks) else 0
    same = graph.candidates is None and one.candidates is None
    for mine, theirs in (
        *((getattr(graph, name)[tasks], getattr(one, name)) for name in ("kind", "rank", "module")),
        (graph.edge_source[edges] - first, one.edge_source),
        (graph.edge_target[edges] - first, one.edge_target),
    ):
        same = same and np.array_equal(mine, theirs)
    if not same:
        problem = "has other tasks or edges than the new one, or candidates"
        raise InputError(f"microbatch {number}", problem, "build the graph anew")

    def put(name: str, where: IntArray) -> IntArray:
        column: IntArray = getattr(graph, name).copy()
        column[where] = getattr(one, name)
        return column

    columns: dict[str, Any] = {name: put(name, pairs) for name in ("activation_bytes", "weight_gradient_bytes")}
    columns |= {"duration_ns": put("duration_ns", tasks), "edge_bytes": put("edge_bytes", edges)}
    for name, column in columns.items():
        summable(name, column, "ns" if name == "duration_ns" else "bytes")
    return with_delays(replace(graph, **columns), put("edge_delay_ns", edges))


def _rows(graph: TaskGraph, edges: tuple[IntArray, IntArray, IntArray]) -> dict[str, Any]:
    return adjacency(edges, (graph.forward_of, graph.backward_of, graph.weight_of), graph.num_tasks)
