"""Reduction of a task graph to the chosen candidates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeloom.taskgraph import (
    BACKWARD,
    KIND_NAMES,
    NO_TASK,
    WEIGHT_GRADIENT,
    Edges,
    IntArray,
    Pairs,
    TaskGraph,
    Tasks,
    make_graph,
)
from pipeloom.timeline.schedule import Schedule, Timeline


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """A graph with one candidate per pair, and the map from the original graph.

    Attributes
    ----------
    graph : TaskGraph
        Graph with the chosen candidates.
    number : array, shape (num_tasks of the original graph,)
        New task number; -1 for a removed task.
    """

    graph: TaskGraph
    number: IntArray

    def schedule(self, schedule: Schedule) -> Schedule:
        """Convert a schedule of the original graph to this graph."""
        renamed = (self.number[tasks] for tasks in schedule.order)
        choice = None if self.graph.candidates is None else np.zeros(self.graph.num_pairs, np.int64)
        return Schedule(tuple(tasks[tasks != NO_TASK] for tasks in renamed), choice, schedule.method)

    def timeline(self, timeline: Timeline) -> Timeline:
        """Convert a timeline of the original graph to this graph."""
        left = self.number != NO_TASK
        return Timeline(timeline.start_ns[left], timeline.end_ns[left], timeline.peak_bytes)


def resolve_candidates(graph: TaskGraph, choice: IntArray | None) -> Resolved:
    """Apply the chosen candidates to a graph, and merge I and W of every backward that they keep whole.

    If a pair with I and W chooses a candidate whose W takes no time, its backward is whole: one B replaces I.

    Parameters
    ----------
    choice : array, shape (num_pairs,), or None
        Candidate index of every pair; None if the graph has no candidates.
    """
    if graph.candidates is None or choice is None:
        return Resolved(graph, np.arange(graph.num_tasks))
    chosen = graph.with_candidates(choice)
    picked = [row[index] for row, index in zip(graph.candidates, choice.tolist(), strict=True)]
    whole = np.array([option.weight_ns == 0 for option in picked], np.bool_) & (graph.weight_of != NO_TASK)
    kind = chosen.kind.copy()
    kind[graph.backward_of[whole]] = BACKWARD
    left = ~(whole[graph.pair] & (graph.kind == WEIGHT_GRADIENT))
    number = np.where(left, np.cumsum(left) - 1, NO_TASK)
    # A pass may have whole and split backwards; each kind is a segment of its own.
    pass_id = np.unique(graph.pass_id[left] * len(KIND_NAMES) + kind[left], return_inverse=True)[1]
    resolved = make_graph(
        name=graph.name,
        num_ranks=graph.num_ranks,
        tasks=Tasks(
            kind=kind[left],
            rank=graph.rank[left],
            duration_ns=chosen.duration_ns[left],
            pair=graph.pair[left],
            pass_id=pass_id,
            microbatch=graph.microbatch[left],
            module=graph.module[left],
            module_names=graph.module_names,
        ),
        pairs=Pairs(
            activation_bytes=chosen.activation_bytes,
            weight_gradient_bytes=chosen.weight_gradient_bytes,
            candidates=tuple((option,) for option in picked),
            labels=None if chosen.labels is None else tuple(chosen.labels),
        ),
        edges=Edges(
            source=number[graph.edge_source],
            target=number[graph.edge_target],
            delay_ns=graph.edge_delay_ns,
            bytes=graph.edge_bytes,
        ),
        static_bytes=graph.static_bytes,
        capacity_bytes=chosen.capacity_bytes,
    )
    return Resolved(replace(resolved, host_capacity_bytes=graph.host_capacity_bytes), number)
