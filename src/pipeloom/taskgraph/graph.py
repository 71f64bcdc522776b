"""Task, TaskGraph: one iteration's scheduling problem as flat arrays (structure of arrays).

Kernels loop over the arrays; `TaskGraph.task` and `TaskGraph.describe` are the readable view. ``docs/formats.md``
(`pipeloom.instance/1`) defines every field and the rules of time and memory. Times are integer nanoseconds and sizes
integer bytes, rounded once when the graph is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError, check_count
from pipeloom.taskgraph.candidates import (
    ACTIVATION_BYTES,
    BACKWARD_NS,
    FORWARD_NS,
    HOST_BYTES,
    WEIGHT_GRADIENT_BYTES,
    WEIGHT_NS,
    Candidate,
    candidate_cube,
)
from pipeloom.taskgraph.columns import (
    KIND_NAMES,
    Edges,
    IntArray,
    PairLabel,
    Pairs,
    Tasks,
    check_length,
    check_range,
    sizes,
)
from pipeloom.taskgraph.labels import ChosenLabels
from pipeloom.taskgraph.rows import Links, adjacency

KindArray = npt.NDArray[np.int8]

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = 0, 1, 2, 3
NO_TASK = -1


class Task(NamedTuple):
    """Readable view of one task."""

    number: int
    kind: str
    rank: int
    duration_ns: int
    pair: int
    pass_id: int
    microbatch: int
    module: str


@dataclass(frozen=True, slots=True, eq=False)
class TaskGraph:
    """Tasks, pairs and edges of one iteration. Make it with `make_graph`, which validates them.

    It has the columns of `Tasks`, `Pairs` and `Edges` (prefixed with ``edge_``) as flat arrays, as kernels read them,
    the memory of each rank, and derived columns: the tasks of every pair, and predecessors and successors.

    Attributes
    ----------
    kind, rank, duration_ns, pair, segment, microbatch, module : array, shape (num_tasks,)
        See `Tasks`.
    activation_bytes, weight_gradient_bytes : array, shape (num_pairs,)
    edge_source, edge_target, edge_delay_ns, edge_bytes : array, shape (num_edges,)
        Declared edges only. ``predecessor`` and ``successor`` also have the implied edges (F before its backward, I
        before W).
    capacity_bytes : array, shape (num_ranks,), or None
        Memory of each rank; None: no limit.
    static_bytes : array, shape (num_ranks,)
        Weights, gradients and optimizer state.
    candidates : per pair a tuple of `Candidate`, or None
    labels : per pair a `PairLabel`, or None for graphs that do not come from a layout
    host_capacity_bytes : array, shape (num_ranks,), or None
        Host memory of each rank for the candidates of its pairs; None: no limit.
    staging_bytes : array, shape (num_ranks,), or None
        Subtracted from the capacity of a rank if a chosen candidate holds bytes on the host, for transfers to the host
        and back; None: nothing. Graphs without candidates stage nothing.
    forward_of, backward_of, weight_of : array, shape (num_pairs,)
        Task numbers of the pair's F, of its B or I, and of its W; -1 if there is none.
    predecessor_start, predecessor, predecessor_delay_ns
        Compressed rows: the predecessors of task i are
        ``predecessor[predecessor_start[i]:predecessor_start[i + 1]]``.
    successor_start, successor, successor_delay_ns
        The same for successors.
    """

    name: str
    num_ranks: int
    module_names: tuple[str, ...]
    kind: KindArray
    rank: IntArray
    duration_ns: IntArray
    pair: IntArray
    pass_id: IntArray
    microbatch: IntArray
    module: IntArray
    activation_bytes: IntArray
    weight_gradient_bytes: IntArray
    edge_source: IntArray
    edge_target: IntArray
    edge_delay_ns: IntArray
    edge_bytes: IntArray
    static_bytes: IntArray
    capacity_bytes: IntArray | None
    candidates: tuple[tuple[Candidate, ...], ...] | None
    labels: Sequence[PairLabel] | None
    forward_of: IntArray
    backward_of: IntArray
    weight_of: IntArray
    predecessor_start: IntArray
    predecessor: IntArray
    predecessor_delay_ns: IntArray
    successor_start: IntArray
    successor: IntArray
    successor_delay_ns: IntArray
    host_capacity_bytes: IntArray | None = None
    staging_bytes: IntArray | None = None

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.kind)

    @property
    def num_pairs(self) -> int:
        """Number of pairs."""
        return len(self.activation_bytes)

    @property
    def predecessors(self) -> Links:
        """Predecessors of all tasks."""
        return Links(self.predecessor_start, self.predecessor, self.predecessor_delay_ns)

    @property
    def successors(self) -> Links:
        """Successors of all tasks."""
        return Links(self.successor_start, self.successor, self.successor_delay_ns)

    @property
    def segment(self) -> IntArray:
        """Return `pass_id`. Deprecated name; removed in the next release."""
        return self.pass_id

    @property
    def num_passes(self) -> int:
        """One more than the largest segment number."""
        return int(self.pass_id.max()) + 1

    @property
    def most_headroom_bytes(self) -> IntArray | None:
        """Capacity less static bytes on ranks that stage nothing, shape (num_ranks,); None: no limit."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.static_bytes

    @property
    def headroom_bytes(self) -> IntArray | None:
        """Capacity less static bytes under every choice of candidates, shape (num_ranks,); None: no limit."""
        free_bytes = self.most_headroom_bytes
        if free_bytes is None or self.staging_bytes is None or self.candidates is None:
            return free_bytes
        return free_bytes - self.staging_bytes

    @property
    def limits_offload(self) -> bool:
        """Whether offloading is limited, by host memory or by staging memory."""
        return self.host_capacity_bytes is not None or self.staging_bytes is not None

    @property
    def chunk_of(self) -> IntArray | None:
        """Chunk of every pair, shape (num_pairs,); None without labels."""
        labels = self.labels.given if isinstance(self.labels, ChosenLabels) else self.labels
        return None if labels is None else np.array([label.chunk for label in labels], np.int64)

    def task(self, number: int) -> Task:
        """Return a readable view of one task."""
        return Task(
            number,
            KIND_NAMES[self.kind[number]],
            int(self.rank[number]),
            int(self.duration_ns[number]),
            int(self.pair[number]),
            int(self.pass_id[number]),
            int(self.microbatch[number]),
            self.module_names[self.module[number]],
        )

    def describe(self, number: int) -> str:
        """Describe a task for messages: ``task 17 (B of lm, microbatch 3, rank 1)``."""
        task = self.task(number)
        return f"task {number} ({task.kind} of {task.module}, microbatch {task.microbatch}, rank {task.rank})"

    def with_candidates(self, choice: npt.ArrayLike | None) -> TaskGraph:
        """Return the graph with the chosen candidate of every pair written into its durations and bytes.

        ``choice`` is an index per pair; None returns the graph unchanged. The result has no candidates, so each task
        has one duration.
        """
        if choice is None:
            return self
        if self.candidates is None:
            raise InputError("candidate", "given, but the instance has no candidates", "use null")
        chosen = np.asarray(choice, dtype=np.int64)
        if chosen.shape != (self.num_pairs,):
            raise InputError("candidate", f"has {chosen.size} entries, the instance {self.num_pairs} pairs")
        cube, lengths = candidate_cube(self.candidates)
        outside = np.flatnonzero((chosen < 0) | (chosen >= lengths))
        if outside.size:
            pair = int(outside[0])
            raise InputError(f"candidate[{pair}]", f"{chosen[pair]} is not in 0..{lengths[pair] - 1}")
        taken = cube[np.arange(self.num_pairs), chosen]
        duration = self.duration_ns.copy()
        for tasks, column in (
            (self.forward_of, FORWARD_NS),
            (self.backward_of, BACKWARD_NS),
            (self.weight_of, WEIGHT_NS),
        ):
            has = tasks != NO_TASK
            duration[tasks[has]] = taken[has, column]
        return replace(
            self,
            duration_ns=duration,
            activation_bytes=taken[:, ACTIVATION_BYTES].copy(),
            weight_gradient_bytes=taken[:, WEIGHT_GRADIENT_BYTES].copy(),
            candidates=None,
            capacity_bytes=self.capacity_under(taken[:, HOST_BYTES]),
            host_capacity_bytes=None,
            staging_bytes=None,
            labels=None if self.labels is None else ChosenLabels(self.labels, self.candidates, chosen),
        )

    def capacity_under(self, host_bytes: IntArray) -> IntArray | None:
        """Return the capacity of every rank less its staging; ``host_bytes`` are per pair, shape (num_pairs,)."""
        if self.capacity_bytes is None or self.staging_bytes is None:
            return self.capacity_bytes
        away = np.bincount(self.rank[self.forward_of], weights=host_bytes > 0, minlength=self.num_ranks) > 0
        left: IntArray = self.capacity_bytes - np.where(away, self.staging_bytes, 0)
        return left


def make_graph(
    *,
    name: str,
    num_ranks: int,
    tasks: Tasks,
    pairs: Pairs,
    edges: Edges,
    static_bytes: npt.ArrayLike | None = None,
    capacity_bytes: npt.ArrayLike | None = None,
) -> TaskGraph:
    """Validate tasks, pairs and edges against each other and make a `TaskGraph`.

    Parameters
    ----------
    name : str
        Name of the graph, shown in messages.
    num_ranks : int
        Number of pipeline ranks.
    tasks : Tasks
        Kind, rank, duration and pair of every task.
    pairs : Pairs
        Bytes, labels and candidates of every pair.
    edges : Edges
        Dependencies between tasks, with their delays.
    static_bytes : array, shape (num_ranks,), or None
        Weights, gradients and optimizer state; None: nothing.
    capacity_bytes : array, shape (num_ranks,), or None
        Memory of each rank; None: no limit.

    Raises
    ------
    InputError
        Lengths differ, numbers are out of range, a pair has not exactly one F or is on two ranks, a segment is twice
        on a rank or has two kinds, edges form a cycle, or times or sizes sum to 2**62 nanoseconds or bytes, or more.
        The message names the array, the entry and the bound.
    """
    check_count("num_ranks", num_ranks)
    kind = np.asarray(tasks.kind)
    rank, pair, pass_id = np.asarray(tasks.rank), np.asarray(tasks.pair), np.asarray(tasks.pass_id)
    activation = np.asarray(pairs.activation_bytes)
    num_tasks, num_pairs = len(kind), len(activation)
    check_range("tasks.rank", rank, num_ranks)
    check_range("tasks.pair", pair, num_pairs)
    forward_of, backward_of, weight_of = _pair_tasks(kind, pair, rank, num_pairs)
    _check_segments(kind, pass_id, rank)
    source, target, delay = np.asarray(edges.source), np.asarray(edges.target), np.asarray(edges.delay_ns)
    check_range("edges.source", source, num_tasks)
    check_range("edges.target", target, num_tasks)
    _check_held(edges, rank)
    capacity = None if capacity_bytes is None else _capacities(capacity_bytes, num_ranks)
    static = np.zeros(num_ranks) if static_bytes is None else static_bytes
    graph = TaskGraph(
        name=name,
        num_ranks=num_ranks,
        module_names=tasks.module_names,
        kind=kind,
        rank=rank,
        duration_ns=np.asarray(tasks.duration_ns),
        pair=pair,
        pass_id=pass_id,
        microbatch=np.asarray(tasks.microbatch),
        module=np.asarray(tasks.module),
        activation_bytes=activation,
        weight_gradient_bytes=np.asarray(pairs.weight_gradient_bytes),
        edge_source=source,
        edge_target=target,
        edge_delay_ns=delay,
        edge_bytes=np.asarray(edges.bytes),
        static_bytes=sizes("memory_static_bytes", static, num_ranks),
        capacity_bytes=capacity,
        candidates=pairs.candidates,
        labels=pairs.labels,
        forward_of=forward_of,
        backward_of=backward_of,
        weight_of=weight_of,
        **adjacency((source, target, delay), (forward_of, backward_of, weight_of), num_tasks),
    )
    topological_order(graph)
    return graph


def _capacities(capacity_bytes: npt.ArrayLike, num_ranks: int) -> IntArray:
    """Check capacities. They are never summed, so there is no limit of their sum."""
    capacity: IntArray = np.asarray(capacity_bytes, dtype=np.int64).reshape(-1)
    check_length("memory_capacity_bytes", capacity, num_ranks)
    check_range("memory_capacity_bytes", capacity, None)
    return capacity


def _check_held(edges: Edges, rank: IntArray) -> None:
    """Raise if an edge between ranks holds bytes."""
    source, target, held = np.asarray(edges.source), np.asarray(edges.target), np.asarray(edges.bytes)
    crossing = np.flatnonzero((held > 0) & (rank[source] != rank[target]))
    if crossing.size:
        e = int(crossing[0])
        raise InputError(
            f"edges.bytes[{e}]",
            f"{held[e]} bytes on an edge from rank {rank[source[e]]} to rank {rank[target[e]]}",
            "only edges inside one rank hold bytes",
        )


def topological_order(graph: TaskGraph) -> IntArray:
    """Return the tasks in an order that respects every edge; raise `InputError` on a cycle."""
    waiting = np.diff(graph.predecessor_start)
    ready = [int(i) for i in np.flatnonzero(waiting == 0)]
    order = []
    start, successor = graph.successor_start.tolist(), graph.successor.tolist()
    left = waiting.tolist()
    while ready:
        task = ready.pop()
        order.append(task)
        for i in range(start[task], start[task + 1]):
            left[successor[i]] -= 1
            if left[successor[i]] == 0:
                ready.append(successor[i])
    if len(order) < graph.num_tasks:
        stuck = next(i for i, n in enumerate(left) if n > 0)
        raise InputError("edges", f"{graph.describe(stuck)} waits for itself", "edges must not form a cycle")
    return np.array(order, dtype=np.int64)


def _pair_tasks(kind: KindArray, pair: IntArray, rank: IntArray, num_pairs: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return the task numbers of each pair's F, B or I, and W; raise on an incomplete or doubled pair."""
    for task in np.flatnonzero((kind < 0) | (kind > 3))[:1].tolist():
        raise InputError(f"tasks.kind[{task}]", f"{kind[task]} is none of F, B, I, W")
    for task in np.flatnonzero(_repeated(kind.astype(np.int64) * num_pairs + pair))[:1].tolist():
        raise InputError(f"tasks.pair[{task}]", f"pair {pair[task]} has a second {KIND_NAMES[kind[task]]}")
    found = np.full((4, num_pairs), NO_TASK, dtype=np.int64)
    found[kind, pair] = np.arange(len(kind))
    forward, whole, inputs, weights = found
    has, has_whole, has_inputs, has_weights = found != NO_TASK
    elsewhere = (found != NO_TASK) & (rank[found] != rank[forward])
    bad = ~has | (has_whole & (has_inputs | has_weights)) | (has_inputs != has_weights) | elsewhere.any(axis=0)
    for p in np.flatnonzero(bad)[:1].tolist():
        if not has[p]:
            raise InputError("tasks.pair", f"pair {p} has no F", "every pair has exactly one F")
        if has_whole[p] and (has_inputs[p] or has_weights[p]):
            raise InputError("tasks.pair", f"pair {p} has a B beside an I or W", "give either B, or I and W")
        if has_inputs[p] != has_weights[p]:
            raise InputError("tasks.pair", f"pair {p} has only one of I and W", "give either B, or I and W")
        task = int(found[elsewhere[:, p], p][0])
        raise InputError(f"tasks.rank[{task}]", f"rank {rank[task]}, the F of pair {p} is on rank {rank[forward[p]]}")
    return forward, np.maximum(whole, inputs), weights


def _check_segments(kind: KindArray, pass_id: IntArray, rank: IntArray) -> None:
    _, first, which = np.unique(pass_id, return_index=True, return_inverse=True)
    mixed = kind != kind[first][which]
    for task in np.flatnonzero(mixed | _repeated(pass_id * (int(rank.max()) + 1) + rank))[:1].tolist():
        number = pass_id[task]
        if mixed[task]:
            names = f"{KIND_NAMES[kind[first[which[task]]]]} and {KIND_NAMES[kind[task]]}"
            raise InputError(f"tasks.segment[{task}]", f"segment {number} has both {names}")
        raise InputError(f"tasks.segment[{task}]", f"segment {number} has a second task on rank {rank[task]}")


def _repeated(values: IntArray) -> npt.NDArray[np.bool_]:
    """Return which entries equal an earlier one."""
    again = np.ones(len(values), np.bool_)
    again[np.unique(values, return_index=True)[1]] = False
    return again
