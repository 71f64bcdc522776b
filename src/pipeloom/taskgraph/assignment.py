"""Assignment of sub-microbatches of replicated modules to ranks, and the graph under each assignment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError
from pipeloom.taskgraph.candidates import Candidate
from pipeloom.taskgraph.changes import with_delays
from pipeloom.taskgraph.columns import IntArray
from pipeloom.taskgraph.graph import NO_TASK, TaskGraph


@dataclass(frozen=True, eq=False)
class Assignable:
    """A graph in which some pairs may be on any rank. Make it with `build_assignable`.

    Tasks, pairs and edges have the same numbers under every assignment, so orders and choices remain valid.

    Attributes
    ----------
    graph : TaskGraph
        The graph under the current assignment.
    homes : tuple, one entry per module
        Chunk numbers by rank of a replicated module; empty for a pipelined one.
    crossing_ns : array, shape (num_edges, num_links)
        Delay of every edge over each link, for ends on different ranks. It has no meaning for edges that never change.
    link : array, shape (num_ranks, num_ranks)
        Number of the link between any two ranks.
    slowness : array, shape (num_ranks,)
        Computing time of each rank relative to a rank of normal speed.
    options : tuple, one entry per pair
        Candidates of every free pair by rank; empty for other pairs. The tuple is empty if all ranks are equally fast.
    """

    graph: TaskGraph
    homes: tuple[tuple[int, ...], ...]
    crossing_ns: IntArray
    link: IntArray
    slowness: npt.NDArray[np.float64]
    options: tuple[tuple[tuple[Candidate, ...], ...], ...] = ()

    @cached_property
    def free(self) -> npt.NDArray[np.bool_]:
        """Pairs that may be on any rank, shape (num_pairs,); none if there is only one rank."""
        of_module = np.array([bool(home) and self.graph.num_ranks > 1 for home in self.homes])
        free: npt.NDArray[np.bool_] = of_module[self.graph.module[self.graph.forward_of]]
        return free

    @cached_property
    def loose(self) -> npt.NDArray[np.bool_]:
        """Edges to or from a free pair, shape (num_edges,). Their delays depend on the assignment."""
        pair, graph = self.graph.pair, self.graph
        loose: npt.NDArray[np.bool_] = self.free[pair[graph.edge_source]] | self.free[pair[graph.edge_target]]
        return loose

    @property
    def assignment(self) -> IntArray:
        """Rank of every pair, shape (num_pairs,)."""
        assignment: IntArray = self.graph.rank[self.graph.forward_of]
        return assignment

    def assigned(self, assignment: IntArray) -> Assignable:
        """Return the same graph under another assignment of the free pairs.

        Parameters
        ----------
        assignment : array, shape (num_pairs,)
            Rank of every pair.

        Raises
        ------
        InputError
            A rank does not exist, or a pair of a pipelined module is moved.
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
                f"move only parts of replicated modules, to ranks 0..{graph.num_ranks - 1}",
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

    def with_speed_of(self, rank: int) -> TaskGraph:
        """Return the graph with the durations of one rank for all free pairs, wherever they are."""
        return self._timed(self.graph, np.full(self.graph.num_pairs, rank))

    def _timed(self, graph: TaskGraph, rank_of: IntArray) -> TaskGraph:
        """Return the graph with the durations of free pairs on the ranks ``rank_of``, shape (num_pairs,)."""
        if not self.options:
            return graph
        current = graph.candidates or ((),) * graph.num_pairs
        candidates = tuple(
            options[rank] if options else own
            for options, own, rank in zip(self.options, current, rank_of.tolist(), strict=True)
        )
        duration = graph.duration_ns.copy()
        for pair in np.flatnonzero(self.free).tolist():
            first = candidates[pair][0]
            times = (first.forward_ns, first.backward_ns, first.weight_ns)
            for tasks, ns in zip((graph.forward_of, graph.backward_of, graph.weight_of), times, strict=True):
                if tasks[pair] != NO_TASK:
                    duration[tasks[pair]] = ns
        return replace(graph, duration_ns=duration, candidates=None if graph.candidates is None else candidates)

    def durations_ns(self, choice: npt.ArrayLike | None) -> IntArray:
        """Return the duration of every task on every rank under chosen candidates, shape (num_tasks, num_ranks)."""
        if not self.options:
            own = self.graph.with_candidates(choice).duration_ns
            return np.repeat(own[:, None], self.graph.num_ranks, axis=1)
        columns = [self.with_speed_of(r).with_candidates(choice).duration_ns for r in range(self.graph.num_ranks)]
        return np.stack(columns, axis=1)

    def within(
        self,
        capacity_bytes: IntArray | None,
        host_capacity_bytes: IntArray | None = None,
        staging_bytes: IntArray | None = None,
    ) -> Assignable:
        """Return the same with other memory limits, each of shape (num_ranks,)."""
        graph = replace(
            self.graph,
            capacity_bytes=capacity_bytes,
            host_capacity_bytes=host_capacity_bytes,
            staging_bytes=staging_bytes,
        )
        return replace(self, graph=graph)

    @cached_property
    def relaxed(self) -> TaskGraph:
        """The graph with no delays to or from free pairs, and with the durations of the fastest rank for them.

        Its longest paths are lower bounds under every assignment.
        """
        fastest = self.with_speed_of(int(self.slowness.argmin()))
        return with_delays(fastest, np.where(self.loose, 0, self.graph.edge_delay_ns))
