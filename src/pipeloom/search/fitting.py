"""Exhaustive search for candidates that fit together, where minimum-memory candidates of every pair do not.

The bytes held after a set of tasks do not depend on its order, so sets of tasks are visited once. A task that fits and
does not increase the held bytes runs at once, since it can only free memory. If the weight gradient of a candidate has
no duration, it runs directly after the input gradient, so that its bytes are held for no time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipeloom.errors import InfeasibleError, NothingFoundError
from pipeloom.search.components import MOST_STATES, NO_LIMIT, label_components, refuse_large_pairs
from pipeloom.search.restricted import MOST_WAYS, RestrictedGraph, keeping, ways_to_stage
from pipeloom.taskgraph import FORWARD, NO_TASK, IntArray, TaskGraph
from pipeloom.timeline import Schedule
from pipeloom.timeline.bounds.bound import extreme_durations
from pipeloom.timeline.options import pair_options, usable

SMALL_TASKS, SMALL_STATES = 12, 200_000
"""Number of tasks up to which a component is small, and maximum number of its states to try. This takes seconds."""


class Option(NamedTuple):
    """Bytes of a pair under one of its candidates."""

    candidate: int
    activation: int
    gradient: int
    """Bytes held from the input gradient to the weight gradient, unless the latter runs directly after it."""
    host: int
    whole: bool
    """Whether the weight gradient has no duration."""


class _Change(NamedTuple):
    """Peak and net change of the bytes on the rank and on its host due to a task."""

    peak: int
    net: int
    host_peak: int
    host_net: int


Chosen = tuple[tuple[int, Option], ...]
"""Options by pair, sorted, as an element of a set."""
Free = tuple[int, ...]
"""Bytes that are free on every rank, and then on the host of every rank."""
Run = tuple["Run", int] | tuple[()]
"""Finished tasks as a linked list: the previous tasks and the last one."""


def fitting_way(graph: TaskGraph, failure: InfeasibleError) -> tuple[RestrictedGraph, Schedule]:
    """Return a schedule that fits, and the graph with the candidates that need no less memory under its staging.

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
    if graph.candidates is None:
        raise failure
    refuse_large_pairs(graph)
    proved, num_ways = not any_lasts_no_time(graph), 0
    for way in ways_to_stage(graph):
        found, exhausted = fitting_schedule(way.graph)
        if found is not None:
            rows = [tuple(way.kept[pair][i] for i in row) for pair, row in enumerate(no_less_memory(way.graph, found))]
            narrowed = keeping(graph, rows)
            staged = replace(narrowed.graph, capacity_bytes=way.graph.capacity_bytes, staging_bytes=None)
            return replace(narrowed, graph=staged), way.schedule(found)
        proved, num_ways = proved and exhausted, num_ways + 1
    if proved and num_ways < MOST_WAYS:
        raise InfeasibleError(f"all orders and choices of candidates were tried, and none fits: {failure}")
    tried = "the candidates that hold the least, and some that fit together"
    raise NothingFoundError(f"tried {tried}; not proved impossible: {failure}")


def fitting_schedule(graph: TaskGraph) -> tuple[Schedule | None, bool]:
    """Return a schedule that fits on devices and hosts: one component after the other, with fitting candidates.

    It is None if no order of a component was found that fits. The second result is whether all orders and candidates of
    this component were tried. If no task has a duration of zero, this proves that no schedule of the graph fits, since
    other components only hold more memory.
    """
    assert graph.candidates is not None
    free = (*_limits(graph, graph.headroom_bytes), *_limits(graph, graph.host_capacity_bytes))
    choice, sequence = np.zeros(graph.num_pairs, np.int64), []
    component_of_task, fits = label_components(graph), usable(graph, pair_options(graph)).tolist()
    for component in range(int(component_of_task.max()) + 1):
        search = _Search(graph, np.flatnonzero(component_of_task == component).tolist(), fits)
        most = SMALL_STATES if len(search.bit) <= SMALL_TASKS else MOST_STATES
        found, exhausted = _choose(search, free, most)
        if found is None:
            return None, exhausted
        tasks, chosen = found
        sequence += tasks
        for pair, option in chosen:
            choice[pair] = option.candidate
    order = np.array(sequence, np.int64)
    orders = tuple(order[graph.rank[order] == rank] for rank in range(graph.num_ranks))
    return Schedule(orders, choice, "fitting"), False


def no_less_memory(graph: TaskGraph, schedule: Schedule) -> list[list[int]]:
    """Return for every pair its candidate in the schedule, and then all candidates that need no less of any memory."""
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


def _limits(graph: TaskGraph, capacity: IntArray | None) -> list[int]:
    return [NO_LIMIT] * graph.num_ranks if capacity is None else capacity.tolist()


def any_lasts_no_time(graph: TaskGraph) -> bool:
    """Return whether a task may have no duration, so that the bytes it holds do not count."""
    least, _ = extreme_durations(graph, pair_options(graph))
    return bool((least == 0).any())


def _choose(search: _Search, free: Free, most: int) -> tuple[tuple[list[int], Chosen] | None, bool]:
    """Return an order of the tasks of one component that fits, and the candidates of its pairs.

    The second result is whether all orders and candidates were tried.
    """
    seen: set[tuple[int, Chosen]] = set()
    stack: list[tuple[int, Free, Run, Chosen]] = [(0, free, (), ())]
    while stack and len(seen) < most:
        done, free, run, chosen = stack.pop()
        done, free, run = search.run_freeing(done, free, dict(chosen), run)
        state = done, search.unfinished(done, chosen)
        if state in seen:
            continue
        seen.add(state)
        if done == (1 << len(search.bit)) - 1:
            return (_sequence(run), chosen), False
        # The last state on the stack is tried first: the one with the smallest increase.
        steps = search.steps(done, free, dict(chosen))
        for change, task, option in sorted(steps, key=lambda step: (-step[0].net, -step[0].host_net)):
            picked = tuple(sorted({**dict(chosen), search.pair[task]: option}.items()))
            stack.append((*search.after(done, free, run, (change, task, option)), picked))
    return None, not stack


def _sequence(run: Run) -> list[int]:
    """Return the tasks in the order in which they ran."""
    tasks = []
    while run:
        run, task = run
        tasks.append(task)
    return tasks[::-1]


class _Search:
    """The tasks of one component and their memory. Sets of tasks are integers with a bit for each task."""

    def __init__(self, graph: TaskGraph, tasks: list[int], fits: list[list[bool]]) -> None:
        self.bit = {task: 1 << i for i, task in enumerate(tasks)}
        rows = graph.predecessor_start
        self.before = dict.fromkeys(tasks, 0)
        for task in tasks:
            # An edge may be listed twice, so bits are not added.
            for before in graph.predecessor[rows[task] : rows[task + 1]].tolist():
                self.before[task] |= self.bit[before]
        late = graph.predecessor_delay_ns > 0
        late |= graph.rank[graph.predecessor] != np.repeat(graph.rank, np.diff(rows))
        self.waits = {task for task in tasks if late[rows[task] : rows[task + 1]].any()}
        """Tasks with a delayed input or one from another rank, for which they may wait in whatever order they run."""
        self.rank = {task: int(graph.rank[task]) for task in tasks}
        self.pair = {task: int(graph.pair[task]) for task in tasks}
        self.forward = {task for task in tasks if graph.kind[task] == FORWARD}
        self.backward, self.weight = graph.backward_of.tolist(), graph.weight_of.tolist()
        self.num_ranks = graph.num_ranks
        self.tasks_of = dict.fromkeys(self.pair.values(), 0)
        for task, pair in self.pair.items():
            self.tasks_of[pair] |= self.bit[task]
        self.options = {pair: _options(graph, pair, fits[pair]) for pair in self.pair.values()}
        self.edges = dict.fromkeys(tasks, 0)
        for source, target, allocated in zip(
            graph.edge_source.tolist(), graph.edge_target.tolist(), graph.edge_bytes.tolist(), strict=True
        ):
            if allocated and source in self.edges:
                self.edges[source] += allocated
                self.edges[target] -= allocated

    def unfinished(self, done: int, chosen: Chosen) -> Chosen:
        """Return the options of pairs with tasks to run. Those of other pairs do not matter for the rest."""
        return tuple(each for each in chosen if self.tasks_of[each[0]] & ~done)

    def joined(self, task: int, option: Option, done: int) -> tuple[int, ...]:
        """Return the weight gradient without duration that runs directly after a task; empty if there is none.

        Such a weight gradient waits for no unfinished task, no delay and no other rank.
        """
        weight = self.weight[self.pair[task]]
        ends = option.whole and task == self.backward[self.pair[task]] and weight not in self.waits
        return (weight,) if ends and not self.before[weight] & ~(done | self.bit[task]) else ()

    def change(self, task: int, option: Option, done: int) -> _Change:
        """Return the peak and net change of bytes due to a task.

        A weight gradient that is joined to the task is included.
        """
        pair = self.pair[task]
        forward = task in self.forward
        ends = task == self.backward[pair] or (forward and self.backward[pair] == NO_TASK)
        first = option.activation if forward else 0
        joined = self.joined(task, option, done)
        last = self.edges[task] + sum(self.edges[weight] for weight in joined)
        if ends:
            last -= option.activation
        if self.weight[pair] != NO_TASK and task == self.backward[pair] and not joined:
            last += option.gradient
        if task == self.weight[pair]:
            last -= option.gradient
        host = option.host if forward else 0
        return _Change(max(first, first + last), first + last, host, host - option.host * ends)

    def left(self, free: Free, task: int, change: _Change) -> Free:
        """Return the free bytes after a task."""
        rank, after = self.rank[task], list(free)
        after[rank] -= change.net
        after[self.num_ranks + rank] -= change.host_net
        return tuple(after)

    def steps(self, done: int, free: Free, chosen: dict[int, Option]) -> list[tuple[_Change, int, Option]]:
        """Return the possible next steps that fit: memory change, task, candidate."""
        found = []
        for task, bit in self.bit.items():
            if done & bit or self.before[task] & ~done:
                continue
            pair, rank = self.pair[task], self.rank[task]
            for option in self.options[pair] if task in self.forward else (chosen[pair],):
                change = self.change(task, option, done)
                if change.peak <= free[rank] and change.host_peak <= free[self.num_ranks + rank]:
                    found.append((change, task, option))
        return found

    def run_freeing(self, done: int, free: Free, chosen: dict[int, Option], run: Run) -> tuple[int, Free, Run]:
        """Run all tasks that fit and do not increase the held bytes, except forwards, whose candidate is a choice."""
        while True:
            steps = self.steps(done, free, chosen)
            step = next((s for s in steps if s[0].net <= 0 and s[1] not in self.forward), None)
            if step is None:
                return done, free, run
            done, free, run = self.after(done, free, run, step)

    def after(self, done: int, free: Free, run: Run, step: tuple[_Change, int, Option]) -> tuple[int, Free, Run]:
        """Return the state after a task and the weight gradient that is joined to it."""
        change, task, option = step
        free = self.left(free, task, change)
        for each in (task, *self.joined(task, option, done)):
            done, run = done | self.bit[each], (run, each)
        return done, free, run


def _options(graph: TaskGraph, pair: int, fits: list[bool]) -> tuple[Option, ...]:
    """Return the candidates of a pair that fit alone, without dominated ones."""
    split = graph.weight_of[pair] != NO_TASK
    assert graph.candidates is not None
    every = [
        Option(
            i,
            option.activation_bytes,
            option.weight_gradient_bytes if split else 0,
            option.host_bytes if graph.host_capacity_bytes is not None else 0,
            bool(split and not option.weight_ns),
        )
        for i, option in enumerate(graph.candidates[pair])
        if fits[i]
    ]
    kept: list[Option] = []
    for option in sorted(every, key=lambda option: (option.activation, not option.whole, *option[2:])):
        if not any(_no_worse(other, option) for other in kept):
            kept.append(option)
    return tuple(kept)


def _no_worse(other: Option, option: Option) -> bool:
    """Return whether ``other``, which needs no more activation bytes, also needs no more of any other memory."""
    joined = 0 if option.whole else option.gradient
    return (
        other.gradient <= option.gradient
        and (0 if other.whole else other.gradient) <= joined
        and other.host <= option.host
    )
