"""Assignment: on which rank each part of a replicated module is worked on, and how a graph changes with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError
from pipeloom.taskgraph.columns import IntArray
from pipeloom.taskgraph.graph import TaskGraph
from pipeloom.taskgraph.rows import close_edges, compressed


@dataclass(frozen=True, eq=False)
class Assignable:
    """A graph some of whose pairs could be on any rank. Make it with `build_assignable`.

    Numbers of tasks, pairs and edges are the same under every assignment, so that orders and choices carry over.

    Attributes
    ----------
    graph : TaskGraph
        Under the assignment it has.
    homes : tuple, one entry per module
        Chunk numbers by rank of a replicated module; nothing for a pipelined one.
    crossing_ns : array, shape (num_edges,)
        Delay of every edge where its ends are on different ranks. Of no meaning for edges that never change.
    """

    graph: TaskGraph
    homes: tuple[tuple[int, ...], ...]
    crossing_ns: IntArray

    @cached_property
    def free(self) -> npt.NDArray[np.bool_]:
        """Pairs that may be on any rank, shape (num_pairs,); none where there is only one rank."""
        anywhere = np.array([bool(home) and self.graph.num_ranks > 1 for home in self.homes])
        found: npt.NDArray[np.bool_] = anywhere[self.graph.module[self.graph.forward_of]]
        return found

    @cached_property
    def loose(self) -> npt.NDArray[np.bool_]:
        """Edges with a free pair at an end, shape (num_edges,): their delays depend on the assignment."""
        pair, graph = self.graph.pair, self.graph
        touched: npt.NDArray[np.bool_] = self.free[pair[graph.edge_source]] | self.free[pair[graph.edge_target]]
        return touched

    @property
    def assignment(self) -> IntArray:
        """Rank of every pair, shape (num_pairs,)."""
        found: IntArray = self.graph.rank[self.graph.forward_of]
        return found

    def assigned(self, assignment: IntArray) -> Assignable:
        """Assign the free pairs anew.

        Parameters
        ----------
        assignment : array, shape (num_pairs,)
            Rank of every pair.

        Raises
        ------
        InputError
            A rank that is none, or another one for a pair of a pipelined module.
        """
        graph = self.graph
        assert graph.labels is not None
        moved = assignment != self.assignment
        wrong = np.flatnonzero((assignment < 0) | (assignment >= graph.num_ranks) | (moved & ~self.free))
        if wrong.size:
            pair = int(wrong[0])
            raise InputError(
                f"assignment[{pair}]",
                f"{assignment[pair]}; {graph.describe(int(graph.forward_of[pair]))}",
                "assign parts of replicated modules, to ranks that there are",
            )
        rank = assignment[graph.pair]
        apart = rank[graph.edge_source] != rank[graph.edge_target]
        delay = np.where(self.loose, np.where(apart, self.crossing_ns, 0), graph.edge_delay_ns)
        labels = list(graph.labels)
        for pair in np.flatnonzero(self.free & moved).tolist():
            home = self.homes[graph.module[graph.forward_of[pair]]]
            labels[pair] = labels[pair]._replace(chunk=home[assignment[pair]])
        changed = replace(with_delays(graph, delay), rank=rank, labels=tuple(labels))
        return Assignable(changed, self.homes, self.crossing_ns)

    def within(
        self,
        capacity_bytes: IntArray | None,
        host_capacity_bytes: IntArray | None = None,
        staging_bytes: IntArray | None = None,
    ) -> Assignable:
        """Return the same under other limits of memory, shape (num_ranks,)."""
        graph = replace(
            self.graph,
            capacity_bytes=capacity_bytes,
            host_capacity_bytes=host_capacity_bytes,
            staging_bytes=staging_bytes,
        )
        return Assignable(graph, self.homes, self.crossing_ns)

    @cached_property
    def relaxed(self) -> TaskGraph:
        """The graph as if nothing were ever sent to or from free pairs: its longest paths bound every assignment's."""
        return with_delays(self.graph, np.where(self.loose, 0, self.graph.edge_delay_ns))


def with_delays(graph: TaskGraph, edge_delay_ns: IntArray) -> TaskGraph:
    """Return the graph with other delays of its edges, shape (num_edges,)."""
    source, target, delay = close_edges(
        graph.edge_source, graph.edge_target, edge_delay_ns, graph.forward_of, graph.backward_of, graph.weight_of
    )
    before = compressed(target, source, delay, graph.num_tasks)
    after = compressed(source, target, delay, graph.num_tasks)
    return replace(
        graph,
        edge_delay_ns=edge_delay_ns,
        predecessor_start=before[0],
        predecessor=before[1],
        predecessor_delay_ns=before[2],
        successor_start=after[0],
        successor=after[1],
        successor_delay_ns=after[2],
    )
