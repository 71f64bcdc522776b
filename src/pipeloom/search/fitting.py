"""Candidates that fit into memory together: an exhaustive search for where the leanest of every pair do not.

What a set of tasks holds once it has run does not depend on its order, so sets are tried and no order twice.
A task that fits and takes nothing for good is run at once: that can only make room. Under a candidate whose weight
gradient takes no time, it runs right behind its input gradient, so that its bytes are held for no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipeloom.search.jobs import NO_LIMIT, label_components
from pipeloom.search.params import DEFAULTS
from pipeloom.search.restricted import Restricted, keeping, ways_to_stage
from pipeloom.taskgraph import FORWARD, NO_TASK, IntArray, TaskGraph
from pipeloom.timeline import Schedule
from pipeloom.timeline.options import pair_options, usable


class Option(NamedTuple):
    """Bytes of a pair under one of its candidates."""

    candidate: int
    activation: int
    gradient: int
    """Held from the input gradient to the weight gradient; 0 where the latter takes no time."""
    host: int
    whole: bool
    """The weight gradient takes no time."""


class _Change(NamedTuple):
    """Bytes that a task changes on its device and on the host of its rank: the most it needs, and what it leaves."""

    peak: int
    net: int
    host_peak: int
    host_net: int


Chosen = tuple[tuple[int, Option], ...]
"""Options by pair, sorted, so that it can be an element of a set."""
Free = tuple[int, ...]
"""Bytes that are free on every rank, and then on the host of every rank."""
Run = tuple["Run", int] | tuple[()]
"""Tasks that were run: the last one behind those before it."""


def fitting_candidates(graph: TaskGraph, states: int = DEFAULTS.feasibility.candidate_states) -> list[list[int]] | None:
    """Per pair the candidates that take no less than one, of which all together fit; that one is the first.

    For graphs whose candidates are lean in different ways, so that choosing pair by pair does not fit. None
    where nothing was found in so many states of a component, which does not prove that there is nothing.
    """
    found = fitting_schedule(graph, states)
    return None if found is None else no_leaner(graph, found)


def fitting_schedule(graph: TaskGraph, states: int = DEFAULTS.feasibility.candidate_states) -> Schedule | None:
    """Return a schedule that fits on devices and hosts: one component after the other, with candidates that fit
    together.

    ``states`` limits the search for each component. None does not prove that no schedule fits.
    """
    assert graph.candidates is not None
    free = (*_limits(graph, graph.room_bytes), *_limits(graph, graph.host_capacity_bytes))
    choice, sequence = np.zeros(graph.num_pairs, np.int64), []
    component_of_task, fits = label_components(graph), usable(graph, pair_options(graph)).tolist()
    for component in range(int(component_of_task.max()) + 1):
        found = _choose(_Search(graph, np.flatnonzero(component_of_task == component).tolist(), fits), free, states)
        if found is None:
            return None
        tasks, chosen = found
        sequence += tasks
        for pair, option in chosen:
            choice[pair] = option.candidate
    order = np.array(sequence, np.int64)
    return Schedule(tuple(order[graph.rank[order] == rank] for rank in range(graph.num_ranks)), choice, "fitting")


def fitting_ways(
    graph: TaskGraph, states: int = DEFAULTS.feasibility.candidate_states
) -> Iterator[tuple[Restricted, Schedule]]:
    """Schedules that fit, each with the candidates of its way to stage that take no less than those it has."""
    for way in ways_to_stage(graph):
        if (found := fitting_schedule(way.graph, states)) is not None:
            rows = [tuple(way.kept[pair][i] for i in row) for pair, row in enumerate(no_leaner(way.graph, found))]
            narrowed = keeping(graph, rows)
            staged = replace(narrowed.graph, capacity_bytes=way.graph.capacity_bytes, staging_bytes=None)
            yield replace(narrowed, graph=staged), way.schedule(found)


def no_leaner(graph: TaskGraph, schedule: Schedule) -> list[list[int]]:
    """Return for every pair the schedule's candidate, and then the candidates that take no less of anything."""
    assert graph.candidates is not None
    assert schedule.candidate is not None
    options, everything = pair_options(graph), np.arange(graph.num_pairs)
    keep = np.ones(options.host_bytes.shape, np.bool_)
    split = (graph.weight_of != NO_TASK)[:, None]
    gradient = np.where(split, options.weight_gradient_bytes, 0)
    for size in (options.activation_bytes, gradient, options.host_bytes * graph.limits_offload):
        keep &= size >= size[everything, schedule.candidate][:, None]
    return [
        [pick, *(i for i in range(len(row)) if keep[pair, i] and i != pick)]
        for pair, (pick, row) in enumerate(zip(schedule.candidate.tolist(), graph.candidates, strict=True))
    ]


def _limits(graph: TaskGraph, room: IntArray | None) -> list[int]:
    return [NO_LIMIT] * graph.num_ranks if room is None else room.tolist()


def _choose(search: _Search, free: Free, most: int) -> tuple[list[int], Chosen] | None:
    """An order of one component's tasks that fits, and the candidates of its pairs."""
    seen: set[tuple[int, Chosen]] = set()
    stack: list[tuple[int, Free, Run, Chosen]] = [(0, free, (), ())]
    while stack and len(seen) < most:
        done, free, run, chosen = stack.pop()
        done, free, run = search.run_what_gives(done, free, dict(chosen), run)
        if (done, chosen) in seen:
            continue
        seen.add((done, chosen))
        if done == search.everything:
            return _sequence(run), chosen
        # The last on the stack is tried first: what takes least.
        steps = search.steps(done, free, dict(chosen))
        for change, task, option in sorted(steps, key=lambda step: (-step[0].net, -step[0].host_net)):
            picked = tuple(sorted({**dict(chosen), search.pair[task]: option}.items()))
            stack.append((*search.after(done, free, run, (change, task, option)), picked))
    return None


def _sequence(run: Run) -> list[int]:
    """The tasks in the order that they were run in."""
    tasks = []
    while run:
        run, task = run
        tasks.append(task)
    return tasks[::-1]


class _Search:
    """The tasks of one component, numbered from 0, and what each takes."""

    def __init__(self, graph: TaskGraph, tasks: list[int], fits: list[list[bool]]) -> None:
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
        self.num_ranks = graph.num_ranks
        self.options = {pair: _options(graph, pair, fits[pair]) for pair in self.pair.values()}
        self.edges = dict.fromkeys(tasks, 0)
        for source, target, allocated in zip(
            graph.edge_source.tolist(), graph.edge_target.tolist(), graph.edge_bytes.tolist(), strict=True
        ):
            if allocated and source in self.edges:
                self.edges[source] += allocated
                self.edges[target] -= allocated

    def joined(self, task: int, option: Option, done: int) -> tuple[int, ...]:
        """Return the weight gradient that runs right behind a task, in no time; empty where none does."""
        weight = self.weight[self.pair[task]]
        ends = option.whole and task == self.backward[self.pair[task]]
        return (weight,) if ends and not self.before[weight] & ~(done | 1 << self.place[task]) else ()

    def change(self, task: int, option: Option, done: int) -> _Change:
        """What a task needs at most above what its rank and its host hold, and what it takes for good.

        The weight gradient that is joined to it counts with it.
        """
        pair = self.pair[task]
        forward = task in self.forward
        ends = task == self.backward[pair] or (forward and self.backward[pair] == NO_TASK)
        first = option.activation if forward else 0
        last = self.edges[task] + sum(self.edges[weight] for weight in self.joined(task, option, done))
        if ends:
            last -= option.activation
        if self.weight[pair] != NO_TASK and task == self.backward[pair]:
            last += option.gradient
        if task == self.weight[pair]:
            last -= option.gradient
        host = option.host if forward else 0
        return _Change(max(first, first + last), first + last, host, host - option.host * ends)

    def left(self, free: Free, task: int, change: _Change) -> Free:
        """What is free once a task has run."""
        rank, after = self.rank[task], list(free)
        after[rank] -= change.net
        after[self.num_ranks + rank] -= change.host_net
        return tuple(after)

    def steps(self, done: int, free: Free, chosen: dict[int, Option]) -> list[tuple[_Change, int, Option]]:
        """Tasks that could run next and fit: what they take, task, candidate."""
        found = []
        for i, task in enumerate(self.tasks):
            if done >> i & 1 or self.before[task] & ~done:
                continue
            pair, rank = self.pair[task], self.rank[task]
            for option in self.options[pair] if task in self.forward else (chosen[pair],):
                change = self.change(task, option, done)
                if change.peak <= free[rank] and change.host_peak <= free[self.num_ranks + rank]:
                    found.append((change, task, option))
        return found

    def run_what_gives(self, done: int, free: Free, chosen: dict[int, Option], run: Run) -> tuple[int, Free, Run]:
        """Run all tasks that fit and take nothing for good, but forwards, whose candidate is to be chosen."""
        while True:
            steps = self.steps(done, free, chosen)
            step = next((s for s in steps if s[0].net <= 0 and s[1] not in self.forward), None)
            if step is None:
                return done, free, run
            done, free, run = self.after(done, free, run, step)

    def after(self, done: int, free: Free, run: Run, step: tuple[_Change, int, Option]) -> tuple[int, Free, Run]:
        """What is done, free and run once a task has run, and the weight gradient that is joined to it."""
        change, task, option = step
        free = self.left(free, task, change)
        for each in (task, *self.joined(task, option, done)):
            done, run = done | 1 << self.place[each], (run, each)
        return done, free, run


def _options(graph: TaskGraph, pair: int, fits: list[bool]) -> tuple[Option, ...]:
    """Candidates of a pair that fit alone, without those than which another takes no more of anything."""
    split = graph.weight_of[pair] != NO_TASK
    assert graph.candidates is not None
    every = [
        Option(
            i,
            option.activation_bytes,
            option.weight_gradient_bytes if split and option.weight_ns else 0,
            option.host_bytes if graph.host_capacity_bytes is not None else 0,
            bool(split and not option.weight_ns),
        )
        for i, option in enumerate(graph.candidates[pair])
        if fits[i]
    ]
    kept: list[Option] = []
    for option in sorted(every, key=lambda option: option[1:]):
        if not any(other.gradient <= option.gradient and other.host <= option.host for other in kept):
            kept.append(option)
    return tuple(kept)
