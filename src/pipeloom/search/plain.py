"""Dual-queue interleaving in plain Python: the cheap fallback, and what the kernel is compared with.

The rules are those of `pipeloom.search.kernels.rollout`; the bookkeeping is not shared. Here queues are sorted
lists, and what a job needs is counted anew each time.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

import numpy as np

from pipeloom.errors import InfeasibleError, PlanError
from pipeloom.search.fitting import fitting_candidates
from pipeloom.search.jobs import Jobs, find_jobs, memory_matters, memory_needs
from pipeloom.taskgraph import FORWARD, NO_TASK, WEIGHT_GRADIENT, TaskGraph
from pipeloom.timeline import Schedule
from pipeloom.timeline.options import pair_options

NEVER = 1 << 62


def first_in_first_out(graph: TaskGraph) -> Schedule:
    """Run microbatches in their order, alternating forwards and backwards, within memory and without deadlock.

    Compiles nothing, so it answers at once; made for graphs of some hundred tasks. Of the candidates it takes
    the base of every pair, or where that does not fit, the leanest, or those that fit together.

    Raises
    ------
    InfeasibleError
        A microbatch does not fit even so; the message names a pair, its rank and the bytes.
    """
    choices: list[list[int] | None] = [None]
    if graph.candidates is not None:
        choices = [[0] * graph.num_pairs, leanest(graph)]
    for number, choice in enumerate(choices):
        chosen = graph.with_candidates(choice)
        try:
            jobs = find_jobs(chosen)
        except InfeasibleError:
            if number == 1 and (rows := fitting_candidates(graph)) is not None:
                choices.append([row[0] for row in rows])
            if number + 1 < len(choices):
                continue
            raise
        rule = 2 if memory_matters(chosen) else 0
        order = plain_rollout(chosen, jobs, segment_priority(chosen), rule=rule)
        candidate = None if choice is None else np.array(choice, np.int64)
        return Schedule(tuple(np.array(tasks, np.int64) for tasks in order), candidate, "first in, first out")
    raise AssertionError("one of the choices is returned or raises")


def leanest(graph: TaskGraph) -> list[int]:
    """Candidate of every pair that holds the least, the faster one where two hold the same."""
    assert graph.candidates is not None
    options = pair_options(graph)
    held = options.activation_bytes
    most = np.where(
        (graph.weight_of != NO_TASK)[:, None], np.maximum(held, options.weight_gradient_bytes), held
    )
    left = np.ones(held.shape, np.bool_)
    for size in (most, held, options.forward_ns + options.backward_ns + options.weight_ns):
        size = np.where(left, size, np.iinfo(np.int64).max)
        left &= size == size.min(axis=1, keepdims=True)
    least: list[int] = left.argmax(axis=1).tolist()
    return least


def segment_priority(graph: TaskGraph) -> list[int]:
    """Rank of every segment by microbatch, then by number: lower goes first."""
    microbatch = np.zeros(graph.num_segments, np.int64)
    microbatch[graph.segment] = graph.microbatch
    priority = np.empty(graph.num_segments, np.int64)
    priority[np.lexsort((np.arange(graph.num_segments), microbatch))] = np.arange(graph.num_segments)
    return [int(p) for p in priority]


@dataclass
class _Rank:
    """One rank's queues and clock."""

    queues: tuple[list[tuple[int, int]], ...] = field(default_factory=lambda: ([], [], []))
    late: list[tuple[int, int]] = field(default_factory=list)
    free_at: int = 0
    last_kind: int = 1
    key: int = NEVER
    blocked: bool = False


class _Memory:
    """Banker's bookkeeping, counted from the set of finished tasks."""

    def __init__(self, graph: TaskGraph, jobs: Jobs) -> None:
        self.peak, self.net = (column.tolist() for column in memory_needs(graph))
        self.rank = graph.rank.tolist()
        self.job = jobs.job_of_task.tolist()
        self.free = jobs.room.tolist()
        self.rows: dict[int, list[int]] = {}
        for task in jobs.order.tolist():
            self.rows.setdefault(self.job[task], []).append(task)
        self.done: set[int] = set()
        self.begun: dict[int, None] = {}

    def need_and_held(self, job: int, done: set[int]) -> tuple[list[int], list[int]]:
        """What a job may still need above what it holds, and what it holds, by rank."""
        level, most, held = ([0] * len(self.free) for _ in range(3))
        for task in self.rows[job]:
            rank = self.rank[task]
            if task in done:
                held[rank] += self.net[task]
            else:
                most[rank] = max(most[rank], level[rank] + self.peak[task])
                level[rank] += self.net[task]
        return most, held

    def admits(self, task: int, banker: bool) -> tuple[bool, bool]:
        """Whether a task may run; and if not, whether only because some job could not finish."""
        rank = self.rank[task]
        if self.peak[task] > self.free[rank]:
            return False, False
        if not banker or self.net[task] <= 0:
            return True, False
        done = self.done | {task}
        available = list(self.free)
        available[rank] -= self.net[task]
        unfinished = {job: self.need_and_held(job, done) for job in {**self.begun, self.job[task]: None}}
        moved = True
        while moved and unfinished:
            moved = False
            for job, (need, held) in list(unfinished.items()):
                if all(n <= a for n, a in zip(need, available, strict=True)):
                    available = [a + h for a, h in zip(available, held, strict=True)]
                    del unfinished[job]
                    moved = True
        return not unfinished, bool(unfinished)

    def take(self, task: int) -> None:
        self.free[self.rank[task]] -= self.net[task]
        self.done.add(task)
        job = self.job[task]
        self.begun[job] = None
        if all(other in self.done for other in self.rows[job]):
            del self.begun[job]


def plain_rollout(
    graph: TaskGraph,
    jobs: Jobs,
    priority: list[int],
    *,
    policy: int = 0,
    weights: int = 0,
    rule: int = 2,
    lookahead: int = 1,
    urgent: int | None = None,
) -> list[list[int]]:
    """Order of tasks per rank under a priority of segments (lower first).

    Parameters
    ----------
    policy : int
        Where both kinds are ready: 0 alternate, 1 backward first, 2 forward first.
    weights : int
        Weight gradients run when nothing else can (0) or before anything else (1).
    rule : int
        0 memory is unlimited, 1 the papers' rule (may deadlock), 2 banker's admission.
    lookahead : int
        How many tasks of a queue are tried when its first is not admitted.
    urgent : int, optional
        Where no backward of a priority below this is ready, forwards go first.

    Raises
    ------
    PlanError
        Under rule 1, where the ranks hold each other up.
    """
    memory = _Memory(graph, jobs)
    kind = [0 if k == FORWARD else 2 if k == WEIGHT_GRADIENT else 1 for k in graph.kind.tolist()]
    rank_of, segment, length = graph.rank.tolist(), graph.segment.tolist(), graph.duration_ns.tolist()
    waiting = np.diff(graph.predecessor_start).tolist()
    ready = [0] * graph.num_tasks
    ranks = [_Rank() for _ in range(graph.num_ranks)]
    order: list[list[int]] = [[] for _ in ranks]

    def put(task: int) -> None:
        insort(ranks[rank_of[task]].queues[kind[task]], (priority[segment[task]], task))

    def choose(home: _Rank, reach: int) -> tuple[int, bool]:
        first = policy == 1 or (policy == 0 and home.last_kind == 0)
        if urgent is not None:
            first = first and bool(home.queues[1]) and home.queues[1][0][0] < urgent
        turns = [int(first), int(not first)]
        unsafe = False
        for which in [2, *turns] if weights else [*turns, 2]:
            for _, task in home.queues[which][: reach if rule else 1]:
                good, only_unsafe = memory.admits(task, rule == 2) if rule else (True, False)
                if good:
                    return task, False
                unsafe = unsafe or only_unsafe
        return -1, unsafe

    for task, count in enumerate(waiting):
        if count == 0:
            put(task)
            ranks[rank_of[task]].key = 0
    for _ in range(graph.num_tasks):
        task = -1
        while task < 0:
            now = min(home.key for home in ranks)
            if now == NEVER:
                found = [choose(home, graph.num_tasks)[0] for home in ranks] if rule == 2 else [-1]
                task = next((t for t in found if t >= 0), -1)
                if task < 0:
                    raise PlanError("memory deadlock: no rank can take its next task")
                break
            home = next(h for h in ranks if h.key == now)
            for late in [entry for entry in home.late if entry[0] <= now]:
                home.late.remove(late)
                put(late[1])
            task, home.blocked = choose(home, lookahead)
            if task < 0:
                home.key = min((when for when, _ in home.late), default=NEVER)
        home = ranks[rank_of[task]]
        begin = max(home.free_at, ready[task])
        home.free_at = begin + length[task]
        home.queues[kind[task]].remove((priority[segment[task]], task))
        if kind[task] < 2:
            home.last_kind = kind[task]
        order[rank_of[task]].append(task)
        if rule:
            memory.take(task)
            if rule == 2 and memory.net[task] < 0:
                for other in ranks:
                    if other.blocked:
                        other.blocked = False
                        other.key = min(other.key, max(other.free_at, begin))
        for e in range(graph.successor_start[task], graph.successor_start[task + 1]):
            after = int(graph.successor[e])
            ready[after] = max(ready[after], home.free_at + int(graph.successor_delay_ns[e]))
            waiting[after] -= 1
            if waiting[after] == 0:
                there = ranks[rank_of[after]]
                if ready[after] <= there.free_at:
                    put(after)
                    there.key = min(there.key, there.free_at)
                else:
                    there.late.append((ready[after], after))
                    there.key = min(there.key, ready[after])
        waits = min((when for when, _ in home.late), default=NEVER)
        home.key = home.free_at if any(home.queues) else max(home.free_at, waits)
    return order
