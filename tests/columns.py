"""Task graphs from flat columns, for tests that change one of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pipeloom.taskgraph import Edges, Pairs, TaskGraph, Tasks, make_graph


def graph_of_columns(**columns: Any) -> TaskGraph:
    """A graph from `make_graph`'s arguments and the columns of its tasks, pairs and (as ``edge_...``) edges."""
    tasks = {f.name: columns.pop(f.name) for f in fields(Tasks) if f.name in columns}
    pairs = {f.name: columns.pop(f.name) for f in fields(Pairs) if f.name in columns}
    edges = {f.name: columns.pop(f"edge_{f.name}") for f in fields(Edges) if f"edge_{f.name}" in columns}
    return make_graph(tasks=Tasks(**tasks), pairs=Pairs(**pairs), edges=Edges(**edges), **columns)
