"""Candidates that fit into memory together: an exhaustive search for where the leanest of every pair do not.

What a set of tasks holds once it has run does not depend on its order, so sets are tried and no order twice.
A task that fits and takes nothing for good is run at once: that can only make room.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.search.jobs import components
from pipeloom.search.params import DEFAULTS
from pipeloom.taskgraph import FORWARD, NO_TASK, IntArray, TaskGraph


class Option(NamedTuple):
    """Bytes of a pair under one of its candidates."""

    candidate: int
    activation: int
    gradient: int


Chosen = tuple[tuple[int, Option], ...]
"""Options by pair, sorted, so that it can be an element of a set."""


def fitting_candidates(graph: TaskGraph, states: int = DEFAULTS.feasibility.candidate_states) -> list[list[int]] | None:
    """Per pair the candidates that take no less than one, of which all together fit; that one is the first.

    For graphs whose candidates are lean in different ways, so that choosing pair by pair does not fit. None
    where nothing was found in so many states of a job, which does not prove that there is nothing.
    """
    assert graph.candidates is not None
    capacity = graph.most_room_bytes
    assert capacity is not None
    chosen: dict[int, Option] = {}
    job_of_task = components(graph)
    for job in range(int(job_of_task.max()) + 1):
        found = _choose(graph, np.flatnonzero(job_of_task == job).tolist(), capacity, states)
        if found is None:
            return None
        chosen.update(found)
    rows = []
    for pair, options in enumerate(graph.candidates):
        pick = chosen[pair]
        others = [
            i
            for i, option in enumerate(options)
            if option.activation_bytes >= pick.activation
            and (graph.weight_of[pair] == NO_TASK or option.weight_gradient_bytes >= pick.gradient)
        ]
        rows.append([pick.candidate, *(i for i in others if i != pick.candidate)])
    return rows


def _choose(graph: TaskGraph, tasks: list[int], capacity: IntArray, most: int) -> dict[int, Option] | None:
    """Candidates of one job's pairs under which some order of its tasks fits."""
    search = _Search(graph, tasks)
    seen: set[tuple[int, Chosen]] = set()
    free: tuple[int, ...] = tuple(capacity.tolist())
    stack: list[tuple[int, tuple[int, ...], Chosen]] = [(0, free, ())]
    while stack and len(seen) < most:
        done, free, chosen = stack.pop()
        done, free = search.run_what_gives(done, free, dict(chosen))
        if (done, chosen) in seen:
            continue
        seen.add((done, chosen))
        if done == search.everything:
            return dict(chosen)
        # The last on the stack is tried first: what takes least.
        for net, task, option in sorted(search.steps(done, free, dict(chosen)), key=lambda step: -step[0]):
            rank = search.rank[task]
            left = (*free[:rank], free[rank] - net, *free[rank + 1 :])
            picked = tuple(sorted({**dict(chosen), search.pair[task]: option}.items()))
            stack.append((done | 1 << search.place[task], left, picked))
    return None


class _Search:
    """The tasks of one job, numbered from 0, and what each takes."""

    def __init__(self, graph: TaskGraph, tasks: list[int]) -> None:
        self.tasks = tasks
        self.place = {task: i for i, task in enumerate(tasks)}
        self.everything = (1 << len(tasks)) - 1
        self.rank = {task: int(graph.rank[task]) for task in tasks}
        self.pair = {task: int(graph.pair[task]) for task in tasks}
        self.forward = {task for task in tasks if graph.kind[task] == FORWARD}
        rows = graph.predecessor_start
        self.before = dict.fromkeys(tasks, 0)
        for task in tasks:
            # An edge may be listed twice, so bits are not added.
            for before in graph.predecessor[rows[task] : rows[task + 1]].tolist():
                self.before[task] |= 1 << self.place[before]
        self.backward, self.weight = graph.backward_of.tolist(), graph.weight_of.tolist()
        self.options = {pair: _options(graph, pair) for pair in self.pair.values()}
        self.edges = dict.fromkeys(tasks, 0)
        for source, target, allocated in zip(
            graph.edge_source.tolist(), graph.edge_target.tolist(), graph.edge_bytes.tolist(), strict=True
        ):
            if allocated and source in self.edges:
                self.edges[source] += allocated
                self.edges[target] -= allocated

    def change(self, task: int, option: Option) -> tuple[int, int]:
        """What a task needs at most above what its rank holds, and what it takes for good."""
        pair = self.pair[task]
        first = option.activation if task in self.forward else 0
        last = self.edges[task]
        if task == self.backward[pair] or (task in self.forward and self.backward[pair] == NO_TASK):
            last -= option.activation
        if self.weight[pair] != NO_TASK and task == self.backward[pair]:
            last += option.gradient
        if task == self.weight[pair]:
            last -= option.gradient
        return max(first, first + last), first + last

    def steps(self, done: int, free: tuple[int, ...], chosen: dict[int, Option]) -> list[tuple[int, int, Option]]:
        """Tasks that could run next and fit: what they take for good, task, candidate."""
        found = []
        for i, task in enumerate(self.tasks):
            if done >> i & 1 or self.before[task] & ~done:
                continue
            pair = self.pair[task]
            for option in self.options[pair] if task in self.forward else (chosen[pair],):
                peak, net = self.change(task, option)
                if peak <= free[self.rank[task]]:
                    found.append((net, task, option))
        return found

    def run_what_gives(
        self, done: int, free: tuple[int, ...], chosen: dict[int, Option]
    ) -> tuple[int, tuple[int, ...]]:
        """Run all tasks that fit and take nothing for good, but forwards, whose candidate is to be chosen."""
        while True:
            step = next((s for s in self.steps(done, free, chosen) if s[0] <= 0 and s[1] not in self.forward), None)
            if step is None:
                return done, free
            rank = self.rank[step[1]]
            free = (*free[:rank], free[rank] - step[0], *free[rank + 1 :])
            done |= 1 << self.place[step[1]]


def _options(graph: TaskGraph, pair: int) -> tuple[Option, ...]:
    """Candidates of a pair than which no other takes less."""
    split = graph.weight_of[pair] != NO_TASK
    assert graph.candidates is not None
    row = graph.candidates[pair]
    free = [not graph.limits_offload or option.host_bytes == 0 for option in row]
    fits = free if any(free) else [True] * len(row)
    every = [
        Option(i, option.activation_bytes, option.weight_gradient_bytes if split else 0)
        for i, option in enumerate(graph.candidates[pair])
        if fits[i]
    ]
    kept: list[Option] = []
    for option in sorted(every, key=lambda option: option[1:]):
        if all(option.gradient < other.gradient for other in kept):
            kept.append(option)
    return tuple(kept)
