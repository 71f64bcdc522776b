"""Dual-queue interleaving in plain Python, as a cheap fallback and as a reference for the kernel.

The rules are those of `pipeloom.search.kernels.decode.decode`, but the implementation is independent. Here queues are
sorted lists, and the memory that a component needs is recomputed each time.
"""

from __future__ import annotations

from bisect import insort
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InfeasibleError, NothingFoundError, PlanError
from pipeloom.search.components import Components, find_components, memory_demand, memory_matters
from pipeloom.search.fitting import fitting_way
from pipeloom.search.kernels.codes import NEVER
from pipeloom.taskgraph import FORWARD, NO_TASK, WEIGHT_GRADIENT, IntArray, TaskGraph
from pipeloom.timeline import Schedule, check
from pipeloom.timeline.options import off_host, pair_options


def first_in_first_out(graph: TaskGraph) -> Schedule:
    """Run microbatches in their order, alternating forwards and backwards, within memory and without deadlock.

    This needs no compilation, so it returns at once for graphs of a few hundred tasks. It chooses the base candidate of
    every pair. If these do not fit, it chooses the minimum-memory candidates, or else candidates that fit together.

    Raises
    ------
    InfeasibleError
        It is proved that a microbatch does not fit. The message names a pair, its rank and the bytes.
    NothingFoundError
        No schedule that fits was found, but this is not proved.
    """
    choices: list[npt.ArrayLike | None] = [None]
    if graph.candidates is not None:
        choices = [[0] * graph.num_pairs, minimum_memory(graph)]
    failure: InfeasibleError | None = None
    for choice in choices:
        try:
            return _under(graph, choice)
        except InfeasibleError as error:
            failure = error
    assert failure is not None
    _, schedule = fitting_way(graph, failure)
    with suppress(InfeasibleError):
        return _under(graph, schedule.candidate)
    return schedule


def _under(graph: TaskGraph, choice: npt.ArrayLike | None) -> Schedule:
    """Schedule first in, first out under a choice of candidates, or raise `InfeasibleError` if it does not fit."""
    chosen = graph.with_candidates(choice)
    components = find_components(chosen)
    rules = Rules(admission=2 if memory_matters(chosen) else 0)
    order = decode_plain(chosen, components, segment_priority(chosen), rules)
    candidate = None if choice is None else np.array(choice, np.int64)
    schedule = Schedule(tuple(np.array(tasks, np.int64) for tasks in order), candidate, "first in, first out")
    if graph.host_capacity_bytes is not None and candidate is not None:
        offloads = pair_options(graph).host_bytes[np.arange(graph.num_pairs), candidate].any()
        if offloads and (faults := check(graph, schedule)):
            raise NothingFoundError(str(faults[0]))
    return schedule


def minimum_memory(graph: TaskGraph) -> IntArray:
    """Return the minimum-memory candidate of every pair, the faster one if two are equal.

    Only candidates that fit alone on device and host count. If offloading is limited, only those without host bytes
    count; see `pipeloom.timeline.options.off_host`.
    """
    assert graph.candidates is not None
    options = pair_options(graph)
    first, second = options.activation_bytes, options.weight_gradient_bytes
    most = np.where((graph.weight_of != NO_TASK)[:, None], np.maximum(first, second), first)
    left = off_host(graph, options)
    away = options.host_bytes * graph.limits_offload
    for size in (most, first, away, options.total_ns):
        size = np.where(left, size, np.iinfo(np.int64).max)
        left &= size == size.min(axis=1, keepdims=True)
    least: IntArray = left.argmax(axis=1)
    return least


def segment_priority(graph: TaskGraph) -> list[int]:
    """Return the priority of every segment, by microbatch and then by number: lower runs first."""
    microbatch = np.zeros(graph.num_passes, np.int64)
    microbatch[graph.pass_id] = graph.microbatch
    priority = np.empty(graph.num_passes, np.int64)
    priority[np.lexsort((np.arange(graph.num_passes), microbatch))] = np.arange(graph.num_passes)
    return [int(p) for p in priority]


@dataclass
class _Rank:
    """The queues and clock of one rank."""

    queues: tuple[list[tuple[int, int]], ...] = field(default_factory=lambda: ([], [], []))
    late: list[tuple[int, int]] = field(default_factory=list)
    free_at: int = 0
    last_kind: int = 1
    key: int = NEVER
    blocked: bool = False


class _Memory:
    """Banker's accounting, computed from the set of finished tasks."""

    def __init__(self, graph: TaskGraph, components: Components) -> None:
        self.peak, self.net = (column.tolist() for column in memory_demand(graph))
        self.rank = graph.rank.tolist()
        self.component = components.component_of_task.tolist()
        self.free = components.capacity.tolist()
        self.rows: dict[int, list[int]] = {}
        for task in components.order.tolist():
            self.rows.setdefault(self.component[task], []).append(task)
        self.done: set[int] = set()
        self.begun: dict[int, None] = {}

    def demand_and_allocated(self, component: int, done: set[int]) -> tuple[list[int], list[int]]:
        """Return, by rank, the bytes that a component may need in addition to those it holds, and those it holds."""
        level, most, allocated = ([0] * len(self.free) for _ in range(3))
        for task in self.rows[component]:
            rank = self.rank[task]
            if task in done:
                allocated[rank] += self.net[task]
            else:
                most[rank] = max(most[rank], level[rank] + self.peak[task])
                level[rank] += self.net[task]
        return most, allocated

    def admits(self, task: int, banker: bool) -> tuple[bool, bool]:
        """Return whether a task may run; and if not, whether the only reason is that a component could not finish."""
        rank = self.rank[task]
        if self.peak[task] > self.free[rank]:
            return False, False
        if not banker or self.net[task] <= 0:
            return True, False
        done = self.done | {task}
        available = list(self.free)
        available[rank] -= self.net[task]
        unfinished = {
            component: self.demand_and_allocated(component, done)
            for component in {**self.begun, self.component[task]: None}
        }
        moved = True
        while moved and unfinished:
            moved = False
            for component, (demand, allocated) in list(unfinished.items()):
                if all(n <= a for n, a in zip(demand, available, strict=True)):
                    available = [a + h for a, h in zip(available, allocated, strict=True)]
                    del unfinished[component]
                    moved = True
        return not unfinished, bool(unfinished)

    def take(self, task: int) -> None:
        self.free[self.rank[task]] -= self.net[task]
        self.done.add(task)
        component = self.component[task]
        self.begun[component] = None
        if all(other in self.done for other in self.rows[component]):
            del self.begun[component]


class Rules(NamedTuple):
    """How the list scheduler chooses tasks.

    Attributes
    ----------
    policy : int
        If both kinds are ready: 0 alternates, 1 runs backwards first, 2 runs forwards first.
    weights : int
        0: weight gradients run if no other task can. 1: they run first.
    admission : int
        0: memory is unlimited. 1: the rule of the papers, which may deadlock. 2: banker's admission.
    lookahead : int
        Number of tasks of a queue that are tried.
    urgent : int, optional
        If no backward with a priority below this number is ready, forwards run first.
    """

    policy: int = 0
    weights: int = 0
    admission: int = 2
    lookahead: int = 1
    urgent: int | None = None


def decode_plain(graph: TaskGraph, components: Components, priority: list[int], rules: Rules) -> list[list[int]]:
    """Return the order of tasks per rank under a priority of segments (lower first).

    Raise `PlanError` if the ranks deadlock under the rule of the papers.
    """
    decoder = _Decoder(graph, components, priority, rules)
    for _ in range(graph.num_tasks):
        decoder.run_next()
    return decoder.order


class _Decoder:
    """List scheduling in progress."""

    def __init__(self, graph: TaskGraph, components: Components, priority: list[int], rules: Rules) -> None:
        self.graph, self.priority, self.rules = graph, priority, rules
        self.memory = _Memory(graph, components)
        self.kind = [0 if k == FORWARD else 2 if k == WEIGHT_GRADIENT else 1 for k in graph.kind.tolist()]
        self.rank_of, self.pass_id = graph.rank.tolist(), graph.pass_id.tolist()
        self.length = graph.duration_ns.tolist()
        self.waiting = np.diff(graph.predecessor_start).tolist()
        self.ready = [0] * graph.num_tasks
        self.ranks = [_Rank() for _ in range(graph.num_ranks)]
        self.order: list[list[int]] = [[] for _ in self.ranks]
        for task, count in enumerate(self.waiting):
            if count == 0:
                self._put(task)
                self.ranks[self.rank_of[task]].key = 0

    def _put(self, task: int) -> None:
        insort(self.ranks[self.rank_of[task]].queues[self.kind[task]], (self.priority[self.pass_id[task]], task))

    def _choose(self, home: _Rank, reach: int) -> tuple[int, bool]:
        """Return the next task of a rank (-1: none), and whether a task was not admitted only because a component could
        not finish.
        """
        rules = self.rules
        first = rules.policy == 1 or (rules.policy == 0 and home.last_kind == 0)
        if rules.urgent is not None:
            first = first and bool(home.queues[1]) and home.queues[1][0][0] < rules.urgent
        turns = [int(first), int(not first)]
        unsafe = False
        for which in [2, *turns] if rules.weights else [*turns, 2]:
            for _, task in home.queues[which][: reach if rules.admission else 1]:
                good, only_unsafe = self.memory.admits(task, rules.admission == 2) if rules.admission else (True, False)
                if good:
                    return task, False
                unsafe = unsafe or only_unsafe
        return -1, unsafe

    def _next(self) -> int:
        """Return the next task of the rank that can start earliest."""
        while True:
            now = min(home.key for home in self.ranks)
            if now == NEVER:
                found = [-1]
                if self.rules.admission == 2:
                    found = [self._choose(home, self.graph.num_tasks)[0] for home in self.ranks]
                task = next((t for t in found if t >= 0), -1)
                if task < 0:
                    raise PlanError("memory deadlock: no rank can take its next task")
                return task
            home = next(h for h in self.ranks if h.key == now)
            for late in [entry for entry in home.late if entry[0] <= now]:
                home.late.remove(late)
                self._put(late[1])
            task, home.blocked = self._choose(home, self.rules.lookahead)
            if task >= 0:
                return task
            home.key = min((when for when, _ in home.late), default=NEVER)

    def run_next(self) -> None:
        """Run one task."""
        task = self._next()
        home = self.ranks[self.rank_of[task]]
        begin = max(home.free_at, self.ready[task])
        home.free_at = begin + self.length[task]
        home.queues[self.kind[task]].remove((self.priority[self.pass_id[task]], task))
        if self.kind[task] < 2:
            home.last_kind = self.kind[task]
        self.order[self.rank_of[task]].append(task)
        if self.rules.admission:
            self._book(task, begin)
        self._pass_on(task, home.free_at)
        waits = min((when for when, _ in home.late), default=NEVER)
        home.key = home.free_at if any(home.queues) else max(home.free_at, waits)

    def _book(self, task: int, begin: int) -> None:
        """Record the memory of a task. Freed memory may unblock other ranks."""
        self.memory.take(task)
        if self.rules.admission == 2 and self.memory.net[task] < 0:
            for other in self.ranks:
                if other.blocked:
                    other.blocked = False
                    other.key = min(other.key, max(other.free_at, begin))

    def _pass_on(self, task: int, end: int) -> None:
        """Update the successors of a task that ends at ``end``."""
        for e in range(self.graph.successor_start[task], self.graph.successor_start[task + 1]):
            after = int(self.graph.successor[e])
            self.ready[after] = max(self.ready[after], end + int(self.graph.successor_delay_ns[e]))
            self.waiting[after] -= 1
            if self.waiting[after] == 0:
                there = self.ranks[self.rank_of[after]]
                if self.ready[after] <= there.free_at:
                    self._put(after)
                    there.key = min(there.key, there.free_at)
                else:
                    there.late.append((self.ready[after], after))
                    there.key = min(there.key, self.ready[after])
