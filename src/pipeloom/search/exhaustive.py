"""Exhaustive search of small graphs: find a schedule where heuristics find none, or prove that none exists.

Tasks are appended one by one to the order of their rank. The candidate of a pair is chosen at its forward. States are
visited once. Bytes that a rank holds between two tasks count only if time passes between them. If tasks may have no
duration, states therefore also include times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipeloom.errors import InfeasibleError, NothingFoundError
from pipeloom.search.components import NO_LIMIT, refuse_large_pairs
from pipeloom.search.restricted import MOST_WAYS, ways_to_stage
from pipeloom.taskgraph import FORWARD, INPUT_GRADIENT, NO_TASK, WEIGHT_GRADIENT, TaskGraph
from pipeloom.timeline import Schedule
from pipeloom.timeline.options import pair_options, usable

MOST_TASKS = 12
"""Maximum number of tasks. Larger graphs would take minutes."""
MOST_STATES = 200_000
"""Maximum number of states before the search gives up."""


class _Option(NamedTuple):
    """One candidate of a pair: its index, the times of its tasks in ns, and its bytes."""

    number: int
    forward_ns: int
    backward_ns: int
    weight_ns: int
    activation: int
    gradient: int
    host: int


class _State(NamedTuple):
    """The set of finished tasks, one bit each, and the resulting times and bytes."""

    done: int
    free_ns: tuple[int, ...]
    """End of the last task of each rank, in ns."""
    allocated: tuple[int, ...]
    """Bytes held on each rank and then on the host of each rank."""
    ready_ns: tuple[int, ...]
    """Earliest start of each task by its finished predecessors, in ns."""
    chosen: tuple[int, ...]
    """Index of the option of each pair; -1 if its forward has not run."""


def any_schedule(graph: TaskGraph) -> tuple[Schedule | None, bool]:
    """Search all orders and candidates for one schedule that fits into memory.

    Parameters
    ----------
    graph : TaskGraph
        Graph with at most `MOST_TASKS` tasks and no staging; see `pipeloom.search.restricted.ways_to_stage`.

    Returns
    -------
    Schedule or None
        The first schedule found.
    bool
        Whether the result is proved: a schedule was found, or all states were tried.
    """
    search = _Exhaustive(graph)
    if min(search.capacity, default=0) < 0:
        return None, True
    zeros = (0,) * graph.num_ranks
    first = _State(0, zeros, zeros * 2, (0,) * graph.num_tasks, (-1,) * graph.num_pairs)
    seen = {search.key(first)}
    stack: list[tuple[_State, tuple[int, ...]]] = [(first, ())]
    while stack:
        state, sequence = stack.pop()
        if len(sequence) == graph.num_tasks:
            return search.schedule(state, sequence), True
        # The last state on the stack is tried first: the one with the fewest held bytes.
        for _, task, after in sorted(search.steps(state), key=lambda step: -step[0]):
            key = search.key(after)
            if key not in seen:
                if len(seen) == MOST_STATES:
                    return None, False
                seen.add(key)
                stack.append((after, (*sequence, task)))
    return None, True


class _Exhaustive:
    """A graph in the form that the search reads."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.rank, self.kind, self.pair = graph.rank.tolist(), graph.kind.tolist(), graph.pair.tolist()
        limits = graph.headroom_bytes, graph.host_capacity_bytes
        self.capacity = [
            int(most) for limit in limits for most in (np.full(graph.num_ranks, NO_LIMIT) if limit is None else limit)
        ]
        self.before = [0] * graph.num_tasks
        self.after: list[list[tuple[int, int]]] = [[] for _ in range(graph.num_tasks)]
        for task in range(graph.num_tasks):
            rows = slice(graph.successor_start[task], graph.successor_start[task + 1])
            self.after[task] = list(
                zip(graph.successor[rows].tolist(), graph.successor_delay_ns[rows].tolist(), strict=True)
            )
            for other, _ in self.after[task]:
                self.before[other] |= 1 << task
        # Bytes of an edge are held from the end of its source to the end of its target.
        self.edges = np.zeros(graph.num_tasks, np.int64)
        np.add.at(self.edges, graph.edge_source, graph.edge_bytes)
        np.subtract.at(self.edges, graph.edge_target, graph.edge_bytes)
        self.timed = any_lasts_no_time(graph)
        self.options = _options(graph, self.timed)

    def _duration_ns(self, task: int, option: _Option) -> int:
        if self.kind[task] == FORWARD:
            return option.forward_ns
        return option.weight_ns if self.kind[task] == WEIGHT_GRADIENT else option.backward_ns

    def _changes(self, task: int, option: _Option) -> tuple[int, int]:
        """Return the change of held bytes at the start and at the end of a task."""
        kind, last = self.kind[task], int(self.edges[task])
        if kind == WEIGHT_GRADIENT:
            return 0, last - option.gradient
        if kind == FORWARD:
            kept = self.graph.backward_of[self.pair[task]] != NO_TASK
            return option.activation, last if kept else last - option.activation
        return 0, last - option.activation + (option.gradient if kind == INPUT_GRADIENT else 0)

    def _host_changes(self, task: int, option: _Option) -> tuple[int, int]:
        """Return the same changes on the host."""
        if self.kind[task] == WEIGHT_GRADIENT:
            return 0, 0
        if self.kind[task] == FORWARD:
            kept = self.graph.backward_of[self.pair[task]] != NO_TASK
            return option.host, 0 if kept else -option.host
        return 0, -option.host

    def key(self, state: _State) -> object:
        """Return the part of a state that determines whether the rest fits."""
        if not self.timed:
            return state.done, state.chosen
        waiting = tuple(0 if state.done >> task & 1 else ready for task, ready in enumerate(state.ready_ns))
        return state.done, state.free_ns, state.allocated, waiting, state.chosen

    def steps(self, state: _State) -> list[tuple[int, int, _State]]:
        """Return the possible next steps that fit: bytes that remain held, task, state."""
        found = list(self._all_steps(state))
        # Without times, a task that does not increase the held bytes can run at once.
        harmless = [s for s in found if s[0] <= 0 and self.kind[s[1]] != FORWARD and not self.timed]
        return harmless[:1] or found

    def _all_steps(self, state: _State) -> Iterator[tuple[int, int, _State]]:
        for task in range(self.graph.num_tasks):
            if state.done >> task & 1 or self.before[task] & ~state.done:
                continue
            pair = self.pair[task]
            options = self.options[pair]
            for place in range(len(options)) if self.kind[task] == FORWARD else (state.chosen[pair],):
                after = self._run(state, task, place)
                if after is not None:
                    yield sum(self._changes(task, options[place])), task, after

    def _run(self, state: _State, task: int, place: int) -> _State | None:
        """Return the state after a task, or None if the task does not fit."""
        rank, option = self.rank[task], self.options[self.pair[task]][place]
        duration = self._duration_ns(task, option)
        start = max(state.free_ns[rank], state.ready_ns[task])
        allocated = list(state.allocated)
        for where, changes in ((rank, self._changes), (self.graph.num_ranks + rank, self._host_changes)):
            capacity, before = self.capacity[where], allocated[where]
            first, last = changes(task, option)
            if self.timed:
                waits = start > state.free_ns[rank]
                if (waits and before > capacity) or (duration and before + first > capacity):
                    return None
            elif max(before + first, before + first + last) > capacity:
                return None
            allocated[where] += first + last
        ready = list(state.ready_ns)
        for other, delay in self.after[task]:
            ready[other] = max(ready[other], start + duration + delay)
        pair = self.pair[task]
        return _State(
            state.done | 1 << task,
            (*state.free_ns[:rank], start + duration, *state.free_ns[rank + 1 :]),
            tuple(allocated),
            tuple(ready),
            (*state.chosen[:pair], place, *state.chosen[pair + 1 :]),
        )

    def schedule(self, state: _State, sequence: tuple[int, ...]) -> Schedule:
        """Convert a sequence into a schedule."""
        order = tuple(
            np.array([task for task in sequence if self.rank[task] == rank], np.int64)
            for rank in range(self.graph.num_ranks)
        )
        candidate = None
        if self.graph.candidates is not None:
            numbers = [self.options[pair][place].number for pair, place in enumerate(state.chosen)]
            candidate = np.array(numbers, np.int64)
        return Schedule(order, candidate, "exhaustive")


def any_lasts_no_time(graph: TaskGraph) -> bool:
    """Return whether a task may have no duration, so that the bytes it holds do not count."""
    options = pair_options(graph)
    durations = (
        (graph.forward_of, options.forward_ns),
        (graph.backward_of, options.backward_ns),
        (graph.weight_of, options.weight_ns),
    )
    return any(bool((ns[tasks != NO_TASK] == 0).any()) for tasks, ns in durations)


def _options(graph: TaskGraph, timed: bool) -> list[list[_Option]]:
    """Return the candidates of every pair without those dominated by another, with equal times if times matter."""
    columns = pair_options(graph)
    fits = usable(graph, columns)
    rows = []
    for pair in range(graph.num_pairs):
        split, trained = graph.weight_of[pair] != NO_TASK, graph.backward_of[pair] != NO_TASK
        number = 1 if graph.candidates is None else len(graph.candidates[pair])
        every = [
            _Option(
                i,
                int(columns.forward_ns[pair, i]),
                int(columns.backward_ns[pair, i]) if trained else 0,
                int(columns.weight_ns[pair, i]) if split else 0,
                int(columns.activation_bytes[pair, i]),
                int(columns.weight_gradient_bytes[pair, i]) if split else 0,
                int(columns.host_bytes[pair, i]) if graph.host_capacity_bytes is not None else 0,
            )
            for i in range(number)
            if fits[pair, i]
        ]
        kept: list[_Option] = []
        for option in sorted(every, key=lambda option: option[4:]):
            better = [other for other in kept if other.gradient <= option.gradient and other.host <= option.host]
            if not any(other[1:4] == option[1:4] or not timed for other in better):
                kept.append(option)
        rows.append(kept)
    return rows


def _any_schedule(graph: TaskGraph) -> tuple[Schedule | None, bool]:
    """Do the same as `any_schedule` for a graph whose ranks may stage."""
    if graph.candidates is None:
        return any_schedule(graph)
    all_sure, count = True, 0
    for way in ways_to_stage(graph):
        found, sure = any_schedule(way.graph)
        if found is not None:
            return way.schedule(found), True
        all_sure, count = all_sure and sure, count + 1
    return None, all_sure and count < MOST_WAYS


def schedule_of_last_resort(graph: TaskGraph, failure: InfeasibleError) -> Schedule:
    """Return any schedule of a small graph for which the heuristics found none.

    Parameters
    ----------
    failure : InfeasibleError
        Error of the heuristics; with candidates, for the minimum-memory candidates.

    Raises
    ------
    InfeasibleError
        It is proved that no schedule fits.
    NothingFoundError
        No schedule was found, but this is not proved.
    """
    if graph.candidates is None and not isinstance(failure, NothingFoundError):
        raise failure
    refuse_large_pairs(graph)
    tried = (
        "some orders" if graph.candidates is None else "the candidates that hold the least, and some that fit together"
    )
    if graph.num_tasks <= MOST_TASKS:
        found, sure = _any_schedule(graph)
        if found is not None:
            return found
        if sure:
            raise InfeasibleError(f"all orders and choices of candidates were tried, and none fits: {failure}")
        tried = f"{MOST_STATES} states of all orders"
    raise NothingFoundError(f"tried {tried}; not proved impossible: {failure}")
