"""Assignment: on which rank each part of a replicated module is worked on, and how a graph changes with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError
from pipeloom.taskgraph.candidates import Candidate
from pipeloom.taskgraph.columns import IntArray
from pipeloom.taskgraph.graph import NO_TASK, TaskGraph
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
    crossing_ns : array, shape (num_edges, num_links)
        Delay of every edge where its ends are on different ranks, by the link between these. Of no meaning for edges
        that never change.
    link : array, shape (num_ranks, num_ranks)
        Number of the link between any two ranks.
    slowness : array, shape (num_ranks,)
        How many times longer each rank computes than most.
    options : tuple, one entry per pair
        Candidates of every free pair by rank, nothing for the others; empty where all ranks are alike.
    """

    graph: TaskGraph
    homes: tuple[tuple[int, ...], ...]
    crossing_ns: IntArray
    link: IntArray
    slowness: npt.NDArray[np.float64]
    options: tuple[tuple[tuple[Candidate, ...], ...], ...] = ()

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
        source, target = rank[graph.edge_source], rank[graph.edge_target]
        crossing = np.take_along_axis(self.crossing_ns, self.link[source, target][:, None], axis=1)[:, 0]
        delay = np.where(self.loose, np.where(source != target, crossing, 0), graph.edge_delay_ns)
        labels = list(graph.labels)
        for pair in np.flatnonzero(self.free & moved).tolist():
            home = self.homes[graph.module[graph.forward_of[pair]]]
            labels[pair] = labels[pair]._replace(chunk=home[assignment[pair]])
        changed = replace(with_delays(graph, delay), rank=rank, labels=tuple(labels))
        return replace(self, graph=self._timed(changed, assignment))

    def as_if_on(self, rank: int) -> TaskGraph:
        """The graph where all free pairs take as long as on one rank, wherever they are."""
        return self._timed(self.graph, np.full(self.graph.num_pairs, rank))

    def _timed(self, graph: TaskGraph, rank_of: IntArray) -> TaskGraph:
        """The graph with free pairs as fast as on these ranks, shape (num_pairs,)."""
        if not self.options:
            return graph
        given = graph.candidates or ((),) * graph.num_pairs
        found = tuple(
            options[rank] if options else own
            for options, own, rank in zip(self.options, given, rank_of.tolist(), strict=True)
        )
        duration = graph.duration_ns.copy()
        for pair in np.flatnonzero(self.free).tolist():
            first = found[pair][0]
            times = (first.forward_ns, first.backward_ns, first.weight_ns)
            for tasks, ns in zip((graph.forward_of, graph.backward_of, graph.weight_of), times, strict=True):
                if tasks[pair] != NO_TASK:
                    duration[tasks[pair]] = ns
        return replace(graph, duration_ns=duration, candidates=None if graph.candidates is None else found)

    def durations_ns(self, choice: npt.ArrayLike | None) -> IntArray:
        """Nanoseconds of every task on every rank under chosen candidates, shape (num_tasks, num_ranks)."""
        if not self.options:
            own = self.graph.with_candidates(choice).duration_ns
            return np.repeat(own[:, None], self.graph.num_ranks, axis=1)
        columns = [self.as_if_on(r).with_candidates(choice).duration_ns for r in range(self.graph.num_ranks)]
        return np.stack(columns, axis=1)

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
        return replace(self, graph=graph)

    @cached_property
    def relaxed(self) -> TaskGraph:
        """The graph as if nothing were ever sent to or from free pairs, and all these on the quickest rank.

        Its longest paths bound every assignment's.
        """
        quickest = self.as_if_on(int(self.slowness.argmin()))
        return with_delays(quickest, np.where(self.loose, 0, self.graph.edge_delay_ns))


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
