"""Task, TaskGraph: one iteration's scheduling problem as flat arrays (structure of arrays).

The arrays are what kernels loop over; `TaskGraph.task` and `TaskGraph.describe` are the readable view.
Meaning of every field and the rules of time and memory: ``docs/formats.md``, `pipeloom.instance/1`.
Times are integer nanoseconds and sizes integer bytes, rounded once when the graph is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError, check_count
from pipeloom.taskgraph.candidates import (
    ACTIVATION_BYTES,
    BACKWARD_NS,
    FORWARD_NS,
    WEIGHT_GRADIENT_BYTES,
    WEIGHT_NS,
    Candidate,
    candidate_cube,
)
from pipeloom.taskgraph.rows import close_edges, compressed

IntArray = npt.NDArray[np.int64]
KindArray = npt.NDArray[np.int8]

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = 0, 1, 2, 3
KIND_NAMES = ("F", "B", "I", "W")
NO_TASK = -1
NS_PER_S = 1_000_000_000


class PairLabel(NamedTuple):
    """What a pair means in a layout: chunk number, microbatch and sub-microbatch."""

    chunk: int
    microbatch: int
    sub_microbatch: int


class Task(NamedTuple):
    """Readable view of one task."""

    number: int
    kind: str
    rank: int
    duration_ns: int
    pair: int
    segment: int
    microbatch: int
    module: str


@dataclass(frozen=True, slots=True, eq=False)
class TaskGraph:
    """One iteration's tasks, pairs and edges. Make it with `make_graph`, which validates and closes it.

    Attributes
    ----------
    kind, rank, duration_ns, pair, segment, microbatch, module : array, shape (num_tasks,)
        ``module`` indexes ``module_names``.
    activation_bytes, weight_gradient_bytes : array, shape (num_pairs,)
    edge_source, edge_target, edge_delay_ns, edge_bytes : array, shape (num_edges,)
        As given. The implied edges (F before its backward, I before W) are not among them; ``predecessors``
        and ``successors`` have both.
    capacity_bytes : array, shape (num_ranks,), or None
        None: no limit.
    static_bytes : array, shape (num_ranks,)
    candidates : per pair a tuple of `Candidate`, or None
    labels : per pair a `PairLabel`, or None for graphs that do not come from a layout
    forward_of, backward_of, weight_of : array, shape (num_pairs,)
        Task numbers of the pair's F, of its B or I, and of its W; -1 where there is none.
    predecessor_start, predecessor, predecessor_delay_ns
        Compressed rows: the predecessors of task i are ``predecessor[start[i]:start[i+1]]``.
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
    segment: IntArray
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
    labels: tuple[PairLabel, ...] | None
    forward_of: IntArray
    backward_of: IntArray
    weight_of: IntArray
    predecessor_start: IntArray
    predecessor: IntArray
    predecessor_delay_ns: IntArray
    successor_start: IntArray
    successor: IntArray
    successor_delay_ns: IntArray

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.kind)

    @property
    def num_pairs(self) -> int:
        """Number of pairs."""
        return len(self.activation_bytes)

    @property
    def num_segments(self) -> int:
        """One more than the largest segment number."""
        return int(self.segment.max()) + 1

    def task(self, number: int) -> Task:
        """Readable view of one task."""
        return Task(
            number, KIND_NAMES[self.kind[number]], int(self.rank[number]), int(self.duration_ns[number]),
            int(self.pair[number]), int(self.segment[number]), int(self.microbatch[number]),
            self.module_names[self.module[number]],
        )  # fmt: skip

    def describe(self, number: int) -> str:
        """A task in words, for messages: ``task 17 (B of lm, microbatch 3, rank 1)``."""
        task = self.task(number)
        return f"task {number} ({task.kind} of {task.module}, microbatch {task.microbatch}, rank {task.rank})"

    def with_candidates(self, choice: npt.ArrayLike | None) -> TaskGraph:
        """Return the graph with the chosen candidate of every pair written into its durations and bytes.

        ``choice`` is an index per pair; None leaves the graph as it is. The result has no candidates left,
        so that what is simulated and checked has one duration only.
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
            (self.forward_of, FORWARD_NS), (self.backward_of, BACKWARD_NS), (self.weight_of, WEIGHT_NS)
        ):  # fmt: skip
            has = tasks != NO_TASK
            duration[tasks[has]] = taken[has, column]
        return replace(
            self, duration_ns=duration, activation_bytes=taken[:, ACTIVATION_BYTES].copy(),
            weight_gradient_bytes=taken[:, WEIGHT_GRADIENT_BYTES].copy(), candidates=None,
        )  # fmt: skip


def make_graph(
    *,
    name: str,
    num_ranks: int,
    module_names: tuple[str, ...],
    kind: npt.ArrayLike,
    rank: npt.ArrayLike,
    duration_ns: npt.ArrayLike,
    pair: npt.ArrayLike,
    segment: npt.ArrayLike,
    microbatch: npt.ArrayLike,
    module: npt.ArrayLike,
    activation_bytes: npt.ArrayLike,
    weight_gradient_bytes: npt.ArrayLike | None,
    edge_source: npt.ArrayLike,
    edge_target: npt.ArrayLike,
    edge_delay_ns: npt.ArrayLike,
    edge_bytes: npt.ArrayLike | None = None,
    static_bytes: npt.ArrayLike | None = None,
    capacity_bytes: npt.ArrayLike | None = None,
    candidates: tuple[tuple[Candidate, ...], ...] | None = None,
    labels: tuple[PairLabel, ...] | None = None,
) -> TaskGraph:
    """Validate the parts of a problem and close them into a `TaskGraph`.

    Raises
    ------
    InputError
        Naming the array, the entry and the bound: lengths that differ, numbers out of range, a pair without
        exactly one F, a pair on two ranks, a segment twice on a rank or of two kinds, a cycle of edges.
    """
    ints = {
        "tasks.rank": rank, "tasks.duration_s": duration_ns, "tasks.pair": pair, "tasks.segment": segment,
        "tasks.microbatch": microbatch, "tasks.module": module,
    }  # fmt: skip
    columns = {key: np.asarray(value, dtype=np.int64) for key, value in ints.items()}
    kinds = np.asarray(kind, dtype=np.int8)
    num_tasks = len(kinds)
    if num_tasks == 0:
        raise InputError("tasks.kind", "is empty", "give at least one task")
    check_count("num_ranks", num_ranks)
    for key, column in columns.items():
        if column.shape != (num_tasks,):
            raise InputError(key, f"has {column.size} entries, tasks.kind has {num_tasks}")
    num_pairs = len(np.asarray(activation_bytes))
    _check_range("tasks.rank", columns["tasks.rank"], num_ranks)
    _check_range("tasks.pair", columns["tasks.pair"], num_pairs)
    _check_range("tasks.module", columns["tasks.module"], len(module_names))
    for key in ("tasks.duration_s", "tasks.segment", "tasks.microbatch"):
        _check_range(key, columns[key], None)
    # Largest segment number below the number of tasks: kernels hold one slot a segment.
    _check_range("tasks.segment", columns["tasks.segment"], num_tasks)

    activation = _sizes("pairs.activation_bytes", activation_bytes, num_pairs)
    weight_gradient = (
        activation
        if weight_gradient_bytes is None
        else _sizes("pairs.weight_gradient_bytes", weight_gradient_bytes, num_pairs)
    )
    forward_of, backward_of, weight_of = _pair_tasks(
        kinds, columns["tasks.pair"], columns["tasks.rank"], num_pairs
    )
    _check_segments(kinds, columns["tasks.segment"], columns["tasks.rank"])

    source = np.asarray(edge_source, dtype=np.int64).reshape(-1)
    target = np.asarray(edge_target, dtype=np.int64).reshape(-1)
    num_edges = len(source)
    if len(target) != num_edges:
        raise InputError("edges.target", f"has {len(target)} entries, edges.source has {num_edges}")
    delay = _sizes("edges.delay_s", edge_delay_ns, num_edges)
    held = (
        np.zeros(num_edges, np.int64) if edge_bytes is None else _sizes("edges.bytes", edge_bytes, num_edges)
    )
    _check_range("edges.source", source, num_tasks)
    _check_range("edges.target", target, num_tasks)
    task_rank = columns["tasks.rank"]
    crossing = np.flatnonzero((held > 0) & (task_rank[source] != task_rank[target]))
    if crossing.size:
        e = int(crossing[0])
        raise InputError(
            f"edges.bytes[{e}]",
            f"{held[e]} bytes on an edge from rank {task_rank[source[e]]} to rank {task_rank[target[e]]}",
            "only edges inside one rank hold bytes",
        )
    static = (
        np.zeros(num_ranks, np.int64)
        if static_bytes is None
        else _sizes("memory_static_bytes", static_bytes, num_ranks)
    )
    capacity = None if capacity_bytes is None else _sizes("memory_capacity_bytes", capacity_bytes, num_ranks)

    full_source, full_target, full_delay = close_edges(
        source, target, delay, forward_of, backward_of, weight_of
    )
    predecessor_start, predecessor, predecessor_delay = compressed(
        full_target, full_source, full_delay, num_tasks
    )
    successor_start, successor, successor_delay = compressed(full_source, full_target, full_delay, num_tasks)
    graph = TaskGraph(
        name=name, num_ranks=num_ranks, module_names=module_names, kind=kinds, rank=task_rank,
        duration_ns=columns["tasks.duration_s"], pair=columns["tasks.pair"], segment=columns["tasks.segment"],
        microbatch=columns["tasks.microbatch"], module=columns["tasks.module"], activation_bytes=activation,
        weight_gradient_bytes=weight_gradient, edge_source=source, edge_target=target, edge_delay_ns=delay,
        edge_bytes=held, static_bytes=static, capacity_bytes=capacity, candidates=candidates, labels=labels,
        forward_of=forward_of, backward_of=backward_of, weight_of=weight_of, predecessor_start=predecessor_start,
        predecessor=predecessor, predecessor_delay_ns=predecessor_delay, successor_start=successor_start,
        successor=successor, successor_delay_ns=successor_delay,
    )  # fmt: skip
    topological_order(graph)
    return graph


def topological_order(graph: TaskGraph) -> IntArray:
    """Tasks in an order that respects every edge; an `InputError` names a task on a cycle."""
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


def _check_range(name: str, values: IntArray, bound: int | None) -> None:
    bad = np.flatnonzero(values < 0)
    if bad.size:
        raise InputError(f"{name}[{bad[0]}]", f"{values[bad[0]]} is negative")
    if bound is not None:
        bad = np.flatnonzero(values >= bound)
        if bad.size:
            raise InputError(f"{name}[{bad[0]}]", f"{values[bad[0]]} is not below {bound}")


def _sizes(name: str, values: npt.ArrayLike, length: int) -> IntArray:
    array = np.asarray(values, dtype=np.int64).reshape(-1)
    if len(array) != length:
        raise InputError(name, f"has {len(array)} entries, expected {length}")
    _check_range(name, array, None)
    return array


def _pair_tasks(
    kind: KindArray, pair: IntArray, rank: IntArray, num_pairs: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Task numbers of each pair's F, B or I, and W; refuse pairs that are not one of the allowed forms."""
    found = np.full((4, num_pairs), NO_TASK, dtype=np.int64)
    for task, (k, p) in enumerate(zip(kind.tolist(), pair.tolist(), strict=True)):
        if not 0 <= k < 4:
            raise InputError(f"tasks.kind[{task}]", f"{k} is none of F, B, I, W")
        if found[k, p] != NO_TASK:
            raise InputError(f"tasks.pair[{task}]", f"pair {p} has a second {KIND_NAMES[k]}")
        found[k, p] = task
    forward, whole, inputs, weights = found
    for p in range(num_pairs):
        if forward[p] == NO_TASK:
            raise InputError("tasks.pair", f"pair {p} has no F", "every pair has exactly one F")
        if whole[p] != NO_TASK and (inputs[p] != NO_TASK or weights[p] != NO_TASK):
            raise InputError("tasks.pair", f"pair {p} has a B beside an I or W", "give either B, or I and W")
        if (inputs[p] == NO_TASK) != (weights[p] == NO_TASK):
            raise InputError("tasks.pair", f"pair {p} has only one of I and W", "give either B, or I and W")
        for task in (whole[p], inputs[p], weights[p]):
            if task != NO_TASK and rank[task] != rank[forward[p]]:
                raise InputError(
                    f"tasks.rank[{task}]",
                    f"rank {rank[task]}, the F of pair {p} is on rank {rank[forward[p]]}",
                )
    return forward, np.maximum(whole, inputs), weights


def _check_segments(kind: KindArray, segment: IntArray, rank: IntArray) -> None:
    kind_of: dict[int, int] = {}
    seen: set[tuple[int, int]] = set()
    for task, (k, s, r) in enumerate(zip(kind.tolist(), segment.tolist(), rank.tolist(), strict=True)):
        if kind_of.setdefault(s, k) != k:
            raise InputError(
                f"tasks.segment[{task}]", f"segment {s} has both {KIND_NAMES[kind_of[s]]} and {KIND_NAMES[k]}"
            )
        if (s, r) in seen:
            raise InputError(f"tasks.segment[{task}]", f"segment {s} has a second task on rank {r}")
        seen.add((s, r))
