"""Independent check of schedules against the rules of the format. It shares no code with the simulator.

Every rule of ``docs/formats.md`` is implemented again here. The check reads the declared arrays of a graph, not the
derived rows and tables of other kernels. It works on whole columns; only violations are visited one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from pipeloom.errors import InputError
from pipeloom.lazy import lazy_module
from pipeloom.taskgraph import KIND_NAMES, NS_PER_S, IntArray, TaskGraph
from pipeloom.timeline.schedule import Schedule, Timeline
from pipeloom.units import exact_size_text

if TYPE_CHECKING:
    from pipeloom.timeline import check_kernels as kernels
else:
    kernels = lazy_module("pipeloom.timeline.check_kernels")

ViolationKind = Literal[
    "missing task", "doubled task", "wrong rank", "order", "overlap", "edge", "start", "memory", "candidate"
]


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule.

    Attributes
    ----------
    kind : str
        ``missing task``, ``doubled task``, ``wrong rank``, ``order`` (a task waits for itself, or the order
        contradicts the starts), ``overlap``, ``edge``, ``start`` (not the earliest), ``memory`` or ``candidate``.
    message : str
        Message with the task, pair or rank, the value and the bound.
    """

    kind: ViolationKind
    message: str

    def __str__(self) -> str:
        """Kind and message in one line."""
        return f"{self.kind}: {self.message}"


class _Costs(NamedTuple):
    """Durations by task, and bytes by pair, under the chosen candidates."""

    duration: IntArray
    activation: IntArray
    weight_gradient: IntArray
    host: IntArray


class _Before(NamedTuple):
    """Predecessors: those of task t are ``task[start[t]:start[t + 1]]``, with delays; ``target`` repeats t."""

    start: IntArray
    task: IntArray
    delay: IntArray
    target: IntArray


class _Parts(NamedTuple):
    """Tasks of every pair: its F, its B or I (its F without a backward), and its W (-1: none)."""

    first: IntArray
    last: IntArray
    weight: IntArray


def check(graph: TaskGraph, schedule: Schedule, timeline: Timeline | None = None) -> tuple[Violation, ...]:
    """Check a schedule and, if given, its times.

    Parameters
    ----------
    graph : TaskGraph
        Tasks, dependencies and memory limits.
    schedule : Schedule
        Order of the tasks on every rank, and the candidate of every pair.
    timeline : Timeline, optional
        Times of the schedule. They must be the earliest that the order allows, up to one nanosecond for every task on
        the longest path to a task, since times are rounded when read.

    Returns
    -------
    tuple of Violation
        Empty if the schedule is feasible. Times and memory are checked only if every task is listed once, on its rank.
    """
    orders = [np.asarray(tasks, dtype=np.int64).reshape(-1) for tasks in schedule.order]
    found = _check_listing(graph, orders)
    costs, candidate_faults = _chosen_costs(graph, schedule)
    found += candidate_faults
    if timeline is not None and not (len(timeline.start_ns) == len(timeline.end_ns) == graph.num_tasks):
        found.append(Violation("start", f"start_s has {len(timeline.start_ns)} entries, tasks {graph.num_tasks}"))
        return tuple(found)
    if found or costs is None:
        return tuple(found)
    parts = _parts(graph)
    before = _everything_before(graph, parts)
    order, rows = np.concatenate(orders), np.cumsum([0, *map(len, orders)])
    start, depth = np.full(graph.num_tasks, -1, np.int64), np.ones(graph.num_tasks, np.int64)
    done = kernels.earliest(order, rows, before.start, before.task, before.delay, costs.duration, start, depth)
    if timeline is not None:
        # Seconds in double precision have about 15 digits, less than nanosecond resolution on very long timelines.
        depth += timeline.makespan_ns >> 50
        found += _check_times(graph, orders, before, costs.duration, timeline, depth)
    if done < graph.num_tasks:
        found.append(_deadlock(graph, orders, before, start))
        return tuple(found)
    if timeline is not None and not found:
        found += _check_earliest(graph, timeline, start, depth)
    end = start + costs.duration
    found += _check_memory(graph, costs, parts, start, end)
    found += _check_host(graph, costs, parts, start, end)
    return tuple(found)


def _check_listing(graph: TaskGraph, orders: list[IntArray]) -> list[Violation]:
    found: list[Violation] = []
    if len(orders) != graph.num_ranks:
        found.append(Violation("wrong rank", f"order has {len(orders)} ranks, not {graph.num_ranks}"))
    times = np.zeros(graph.num_tasks, np.int64)
    for rank, tasks in enumerate(orders):
        known = (tasks >= 0) & (tasks < graph.num_tasks)
        times += np.bincount(tasks[known], minlength=graph.num_tasks)
        wrong = ~known
        wrong[known] = graph.rank[tasks[known]] != rank
        for place in np.flatnonzero(wrong).tolist():
            task = int(tasks[place])
            if not known[place]:
                problem = f"order[{rank}] has task {task}, not in 0..{graph.num_tasks - 1}"
                found.append(Violation("missing task", problem))
            else:
                found.append(Violation("wrong rank", f"{graph.describe(task)} is listed on rank {rank}"))
    for task in np.flatnonzero(times != 1).tolist():
        if times[task] == 0:
            found.append(Violation("missing task", f"{graph.describe(task)} is not in the order"))
        else:
            problem = f"{graph.describe(task)} is in the order {times[task]} times, not once"
            found.append(Violation("doubled task", problem))
    return found


def _chosen_costs(graph: TaskGraph, schedule: Schedule) -> tuple[_Costs | None, list[Violation]]:
    if graph.candidates is None:
        if schedule.candidate is not None:
            return None, [Violation("candidate", "given, but the instance has no candidates")]
        none = np.zeros(graph.num_pairs, np.int64)
        return _Costs(graph.duration_ns, graph.activation_bytes, graph.weight_gradient_bytes, none), []
    if schedule.candidate is None:
        return None, [Violation("candidate", "null, but the instance has candidates: choose one for every pair")]
    if len(schedule.candidate) != graph.num_pairs:
        problem = f"has {len(schedule.candidate)} entries, the instance {graph.num_pairs} pairs"
        return None, [Violation("candidate", problem)]
    choice = [int(raw) for raw in schedule.candidate]
    found = [
        Violation("candidate", f"pair {pair} has candidate {index}, not in 0..{len(options) - 1}")
        for pair, (index, options) in enumerate(zip(choice, graph.candidates, strict=True))
        if not 0 <= index < len(options)
    ]
    if found:
        return None, found
    chosen = [options[index] for options, index in zip(graph.candidates, choice, strict=True)]
    times = {
        "F": [option.forward_ns for option in chosen],
        "B": [option.backward_ns for option in chosen],
        "I": [option.backward_ns for option in chosen],
        "W": [option.weight_ns for option in chosen],
    }
    duration = np.array([times[name] for name in KIND_NAMES], np.int64)[graph.kind, graph.pair]
    costs = _Costs(
        duration=duration,
        activation=np.array([option.activation_bytes for option in chosen], np.int64),
        weight_gradient=np.array([option.weight_gradient_bytes for option in chosen], np.int64),
        host=np.array([option.host_bytes for option in chosen], np.int64),
    )
    return costs, []


def _parts(graph: TaskGraph) -> _Parts:
    task = np.arange(graph.num_tasks)
    of_kind = {}
    for kind, name in enumerate(KIND_NAMES):
        mine = graph.kind == kind
        of_kind[name] = np.full(graph.num_pairs, -1, np.int64)
        of_kind[name][graph.pair[mine]] = task[mine]
    last = np.maximum(of_kind["B"], of_kind["I"])
    return _Parts(of_kind["F"], np.where(last < 0, of_kind["F"], last), of_kind["W"])


def _everything_before(graph: TaskGraph, parts: _Parts) -> _Before:
    """Return predecessors and delays, from the declared edges and the rules F before B or I, I before W."""
    trained, split = parts.last != parts.first, parts.weight >= 0
    source = np.concatenate([graph.edge_source, parts.first[trained], parts.last[split]])
    target = np.concatenate([graph.edge_target, parts.last[trained], parts.weight[split]])
    delay = np.zeros(len(source), np.int64)
    delay[: len(graph.edge_delay_ns)] = graph.edge_delay_ns
    by_target = np.argsort(target, kind="stable")
    start = np.zeros(graph.num_tasks + 1, np.int64)
    np.cumsum(np.bincount(target, minlength=graph.num_tasks), out=start[1:])
    return _Before(start, source[by_target], delay[by_target], target[by_target])


def _deadlock(graph: TaskGraph, orders: list[IntArray], before: _Before, start: IntArray) -> Violation:
    """Name the first task of each rank that never starts, and the first task that it waits for."""
    waits = []
    for rank, tasks in enumerate(orders):
        stuck = np.flatnonzero(start[tasks] < 0)
        if stuck.size:
            task = int(tasks[stuck[0]])
            row = before.task[before.start[task] : before.start[task + 1]]
            missing = int(row[start[row] < 0][0])
            waits.append(f"rank {rank} stops at {graph.describe(task)}, which waits for {graph.describe(missing)}")
    return Violation("order", "deadlocks: " + "; ".join(waits))


def _check_times(
    graph: TaskGraph, orders: list[IntArray], before: _Before, duration: IntArray, timeline: Timeline, depth: IntArray
) -> list[Violation]:
    found = []
    start, end = np.asarray(timeline.start_ns, np.int64), np.asarray(timeline.end_ns, np.int64)
    other = np.abs(end - start - duration) > 1
    for task in np.flatnonzero((start < 0) | other).tolist():
        if start[task] < 0:
            found.append(Violation("start", f"{graph.describe(task)} starts at {_s(start[task])}, before 0 s"))
        if other[task]:
            took, due = _s(end[task] - start[task]), _s(duration[task])
            found.append(Violation("start", f"{graph.describe(task)} lasts {took}, its duration is {due}"))
    for tasks in orders:
        early = np.flatnonzero(start[tasks[1:]] < end[tasks[:-1]] - depth[tasks[1:]])
        for first, second in zip(tasks[early].tolist(), tasks[early + 1].tolist(), strict=True):
            a, b = graph.describe(first), graph.describe(second)
            if end[second] <= start[first] + depth[second]:
                found.append(
                    Violation("order", f"{b} is listed after {a}, but starts before it, at {_s(start[second])}")
                )
            else:
                found.append(
                    Violation("overlap", f"{b} starts at {_s(start[second])}, {a} on its rank ends at {_s(end[first])}")
                )
    allowed = end[before.task] + before.delay
    for e in np.flatnonzero(start[before.target] < allowed - depth[before.target]).tolist():
        task, source = int(before.target[e]), int(before.task[e])
        found.append(
            Violation(
                "edge",
                f"{graph.describe(task)} starts at {_s(start[task])}, {graph.describe(source)} allows it "
                f"from {_s(allowed[e])} (its end plus {_s(before.delay[e])})",
            )
        )
    return found


def _check_earliest(graph: TaskGraph, timeline: Timeline, earliest: IntArray, depth: IntArray) -> list[Violation]:
    start = np.asarray(timeline.start_ns, np.int64)
    return [
        Violation(
            "start", f"{graph.describe(task)} starts at {_s(start[task])}, its earliest start is {_s(earliest[task])}"
        )
        for task in np.flatnonzero(np.abs(start - earliest) > depth).tolist()
    ]


def _most(static: IntArray, rank: IntArray, begin: IntArray, end: IntArray, held: IntArray) -> list[tuple[int, int]]:
    """Return the peak of every rank and its first time if ranks hold bytes from ``begin`` to ``end``.

    Bytes that end at a time are free for tasks that start then.
    """
    some = begin < end
    rank = np.tile(rank[some], 2)
    time = np.concatenate([begin[some], end[some]])
    change = np.concatenate([held[some], -held[some]])
    sequence = np.lexsort((time, rank))
    rows = np.searchsorted(rank[sequence], np.arange(len(static) + 1)).tolist()
    answer = []
    for base, first, last in zip(static.tolist(), rows, rows[1:], strict=False):
        mine = sequence[first:last]
        used = base + np.cumsum(change[mine])
        # Changes of one moment count together.
        moment = np.flatnonzero(np.diff(time[mine], append=-1))
        best = int(moment[np.argmax(used[moment])]) if moment.size else -1
        above = best >= 0 and used[best] > base
        answer.append((int(used[best]), int(time[mine[best]])) if above else (base, 0))
    return answer


def _check_memory(graph: TaskGraph, costs: _Costs, parts: _Parts, start: IntArray, end: IntArray) -> list[Violation]:
    """Check device memory over half-open spans: bytes that end at a time are free for tasks that start then."""
    if graph.capacity_bytes is None:
        return []
    split, holds = np.flatnonzero(parts.weight >= 0), np.flatnonzero(graph.edge_bytes)
    source, target = graph.edge_source[holds], graph.edge_target[holds]
    home = graph.rank[parts.first]
    most = _most(
        graph.static_bytes,
        np.concatenate([home, home[split], graph.rank[source]]),
        np.concatenate([start[parts.first], end[parts.last[split]], end[source]]),
        np.concatenate([end[parts.last], end[parts.weight[split]], end[target]]),
        np.concatenate([costs.activation, costs.weight_gradient[split], graph.edge_bytes[holds]]),
    )
    found = []
    for rank, (worst, when) in enumerate(most):
        capacity = int(graph.capacity_bytes[rank])
        if graph.staging_bytes is not None and (costs.host[home == rank] > 0).any():
            capacity -= int(graph.staging_bytes[rank])
        if worst > capacity:
            running = np.flatnonzero((graph.rank == rank) & (start <= when) & (when < end))
            during = ""
            if running.size:
                task = int(running[0])
                during = f" during {graph.describe(task)}, pair {int(graph.pair[task])}"
            held, limit = exact_size_text(worst), exact_size_text(capacity)
            problem = f"rank {rank} holds {held} at {_s(when)}{during}; its capacity is {limit}"
            found.append(Violation("memory", problem))
    return found


def _check_host(graph: TaskGraph, costs: _Costs, parts: _Parts, start: IntArray, end: IntArray) -> list[Violation]:
    """Check host memory, which a pair holds from the start of its F to the end of its B or I."""
    if graph.host_capacity_bytes is None:
        return []
    nothing = np.zeros(graph.num_ranks, np.int64)
    most = _most(nothing, graph.rank[parts.first], start[parts.first], end[parts.last], costs.host)
    found = []
    for rank, (worst, when) in enumerate(most):
        capacity = int(graph.host_capacity_bytes[rank])
        if worst > capacity:
            held, limit = exact_size_text(worst), exact_size_text(capacity)
            problem = f"rank {rank} holds {held} on the host at {_s(when)}; its capacity there is {limit}"
            found.append(Violation("memory", problem))
    return found


def _s(nanoseconds: int | np.int64) -> str:
    return f"{int(nanoseconds) / NS_PER_S:.9f} s"


def require_feasible(graph: TaskGraph, schedule: Schedule, timeline: Timeline | None = None) -> None:
    """Raise `InputError` with the first violation, if any."""
    found = check(graph, schedule, timeline)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise InputError("schedule", f"{found[0]}{more}")
