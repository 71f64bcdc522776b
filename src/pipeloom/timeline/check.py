"""An independent judge of schedules: plain Python over the format's rules, nothing shared with the simulator.

Every rule is stated again here, from ``docs/formats.md``: it reads a graph's given arrays, not the closed
rows and tables that kernels use.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pipeloom.errors import InputError
from pipeloom.taskgraph import KIND_NAMES, NS_PER_S, TaskGraph
from pipeloom.timeline.schedule import Schedule, Timeline

ViolationKind = Literal[
    "missing task", "doubled task", "wrong rank", "order", "overlap", "edge", "start", "memory", "candidate"
]


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule.

    Attributes
    ----------
    kind : str
        ``missing task``, ``doubled task``, ``wrong rank``, ``order`` (it waits for itself, or contradicts the
        given starts), ``overlap``, ``edge``, ``start`` (not the earliest), ``memory`` or ``candidate``.
    message : str
        Names the task, pair or rank, the value and the bound.
    """

    kind: ViolationKind
    message: str

    def __str__(self) -> str:
        """Kind and message in one line."""
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class _Costs:
    """Durations and bytes under the chosen candidates, as plain lists."""

    duration: list[int]
    activation: list[int]
    weight_gradient: list[int]
    host: list[int]


def check(graph: TaskGraph, schedule: Schedule, timeline: Timeline | None = None) -> tuple[Violation, ...]:
    """Judge a schedule, and where given the times that go with it.

    Parameters
    ----------
    graph : TaskGraph
    schedule : Schedule
    timeline : Timeline, optional
        Times that came with the schedule. They must be the earliest that the order allows, up to one
        nanosecond for every task on the longest path to a task (times are rounded when read).

    Returns
    -------
    tuple of Violation
        Empty where the schedule is feasible. Faults of the order hide those that follow from them: times and
        memory are judged only where every task is listed once, on its rank.
    """
    found = _check_listing(graph, schedule)
    costs, candidate_faults = _chosen_costs(graph, schedule)
    found += candidate_faults
    if timeline is not None and not (len(timeline.start_ns) == len(timeline.end_ns) == graph.num_tasks):
        found.append(Violation("start", f"start_s has {len(timeline.start_ns)} entries, tasks {graph.num_tasks}"))
        return tuple(found)
    if found or costs is None:
        return tuple(found)
    order = [[int(t) for t in tasks] for tasks in schedule.order]
    before = _everything_before(graph)
    earliest, depth = _earliest(graph, order, before, costs.duration)
    if timeline is not None:
        # Seconds in double precision hold some fifteen digits: on very long timelines less than a nanosecond.
        slack = timeline.makespan_ns >> 50
        depth = [each + slack for each in depth]
        found += _check_times(graph, order, before, costs.duration, timeline, depth)
    if earliest is None:
        found.append(_deadlock(graph, order, before))
        return tuple(found)
    if timeline is not None and not found:
        found += _check_earliest(graph, timeline, earliest, depth)
    found += _check_memory(graph, costs, earliest)
    found += _check_host(graph, costs, earliest)
    return tuple(found)


def _check_listing(graph: TaskGraph, schedule: Schedule) -> list[Violation]:
    found: list[Violation] = []
    if len(schedule.order) != graph.num_ranks:
        found.append(Violation("wrong rank", f"order has {len(schedule.order)} ranks, not {graph.num_ranks}"))
    times = [0] * graph.num_tasks
    for rank, tasks in enumerate(schedule.order):
        for raw in tasks:
            task = int(raw)
            if not 0 <= task < graph.num_tasks:
                found.append(
                    Violation("missing task", f"order[{rank}] has task {task}, not in 0..{graph.num_tasks - 1}")
                )
                continue
            times[task] += 1
            if int(graph.rank[task]) != rank:
                found.append(Violation("wrong rank", f"{graph.describe(task)} is listed on rank {rank}"))
    for task, count in enumerate(times):
        if count == 0:
            found.append(Violation("missing task", f"{graph.describe(task)} is not in the order"))
        elif count > 1:
            found.append(Violation("doubled task", f"{graph.describe(task)} is in the order {count} times, not once"))
    return found


def _chosen_costs(graph: TaskGraph, schedule: Schedule) -> tuple[_Costs | None, list[Violation]]:
    costs = _Costs(
        [int(d) for d in graph.duration_ns],
        [int(b) for b in graph.activation_bytes],
        [int(b) for b in graph.weight_gradient_bytes],
        [0] * graph.num_pairs,
    )
    if graph.candidates is None:
        if schedule.candidate is not None:
            return None, [Violation("candidate", "given, but the instance has no candidates")]
        return costs, []
    if schedule.candidate is None:
        return None, [Violation("candidate", "null, but the instance has candidates: choose one for every pair")]
    if len(schedule.candidate) != graph.num_pairs:
        problem = f"has {len(schedule.candidate)} entries, the instance {graph.num_pairs} pairs"
        return None, [Violation("candidate", problem)]
    found = []
    for pair, raw in enumerate(schedule.candidate):
        options = graph.candidates[pair]
        if not 0 <= int(raw) < len(options):
            found.append(Violation("candidate", f"pair {pair} has candidate {int(raw)}, not in 0..{len(options) - 1}"))
    if found:
        return None, found
    for task in range(graph.num_tasks):
        pair = int(graph.pair[task])
        option = graph.candidates[pair][int(schedule.candidate[pair])]
        name = KIND_NAMES[graph.kind[task]]
        costs.duration[task] = {
            "F": option.forward_ns,
            "B": option.backward_ns,
            "I": option.backward_ns,
            "W": option.weight_ns,
        }[name]
        costs.activation[pair] = option.activation_bytes
        costs.weight_gradient[pair] = option.weight_gradient_bytes
        costs.host[pair] = option.host_bytes
    return costs, []


def _everything_before(graph: TaskGraph) -> list[list[tuple[int, int]]]:
    """Per task its (predecessor, delay), from the given edges and the rules F before B or I, I before W."""
    before: list[list[tuple[int, int]]] = [[] for _ in range(graph.num_tasks)]
    for source, target, delay in zip(
        graph.edge_source.tolist(), graph.edge_target.tolist(), graph.edge_delay_ns.tolist(), strict=True
    ):
        before[target].append((source, delay))
    parts: dict[int, dict[str, int]] = defaultdict(dict)
    for task, (kind, pair) in enumerate(zip(graph.kind.tolist(), graph.pair.tolist(), strict=True)):
        parts[pair][KIND_NAMES[kind]] = task
    for tasks in parts.values():
        for first, second in (("F", "B"), ("F", "I"), ("I", "W")):
            if first in tasks and second in tasks:
                before[tasks[second]].append((tasks[first], 0))
    return before


def _earliest(
    graph: TaskGraph, order: list[list[int]], before: list[list[tuple[int, int]]], duration: list[int]
) -> tuple[list[int] | None, list[int]]:
    """Earliest start of every task (None if the order deadlocks) and the number of tasks on a path to it."""
    start, depth = [-1] * graph.num_tasks, [1] * graph.num_tasks
    position = [0] * len(order)
    moved = True
    while moved:
        moved = False
        for rank, tasks in enumerate(order):
            while position[rank] < len(tasks):
                task = tasks[position[rank]]
                if any(start[p] < 0 for p, _ in before[task]):
                    break
                at, deep = 0, 0
                if position[rank]:
                    previous = tasks[position[rank] - 1]
                    at, deep = start[previous] + duration[previous], depth[previous]
                for p, delay in before[task]:
                    at = max(at, start[p] + duration[p] + delay)
                    deep = max(deep, depth[p])
                start[task], depth[task] = at, deep + 1
                position[rank] += 1
                moved = True
    return (None if -1 in start else start), depth


def _deadlock(graph: TaskGraph, order: list[list[int]], before: list[list[tuple[int, int]]]) -> Violation:
    done: set[int] = set()
    heads = [list(tasks) for tasks in order]
    moved = True
    while moved:
        moved = False
        for tasks in heads:
            while tasks and all(p in done for p, _ in before[tasks[0]]):
                done.add(tasks.pop(0))
                moved = True
    waits = []
    for rank, tasks in enumerate(heads):
        if tasks:
            missing = next(p for p, _ in before[tasks[0]] if p not in done)
            waits.append(f"rank {rank} stops at {graph.describe(tasks[0])}, which waits for {graph.describe(missing)}")
    return Violation("order", "deadlocks: " + "; ".join(waits))


def _check_times(
    graph: TaskGraph,
    order: list[list[int]],
    before: list[list[tuple[int, int]]],
    duration: list[int],
    timeline: Timeline,
    depth: list[int],
) -> list[Violation]:
    found = []
    start = [int(t) for t in timeline.start_ns]
    end = [int(t) for t in timeline.end_ns]
    for task in range(graph.num_tasks):
        if start[task] < 0:
            found.append(Violation("start", f"{graph.describe(task)} starts at {_s(start[task])}, before 0 s"))
        if abs(end[task] - start[task] - duration[task]) > 1:
            took, due = _s(end[task] - start[task]), _s(duration[task])
            found.append(Violation("start", f"{graph.describe(task)} lasts {took}, its duration is {due}"))
    for tasks in order:
        for first, second in pairwise(tasks):
            if start[second] >= end[first] - depth[second]:
                continue
            a, b = graph.describe(first), graph.describe(second)
            if end[second] <= start[first] + depth[second]:
                found.append(
                    Violation("order", f"{b} is listed after {a}, but starts before it, at {_s(start[second])}")
                )
            else:
                found.append(
                    Violation("overlap", f"{b} starts at {_s(start[second])}, {a} on its rank ends at {_s(end[first])}")
                )
    for task in range(graph.num_tasks):
        for p, delay in before[task]:
            bound = end[p] + delay
            if start[task] < bound - depth[task]:
                found.append(
                    Violation(
                        "edge",
                        f"{graph.describe(task)} starts at {_s(start[task])}, {graph.describe(p)} allows it "
                        f"from {_s(bound)} (its end plus {_s(delay)})",
                    )
                )
    return found


def _check_earliest(graph: TaskGraph, timeline: Timeline, earliest: list[int], depth: list[int]) -> list[Violation]:
    found = []
    for task, at in enumerate(earliest):
        given = int(timeline.start_ns[task])
        if abs(given - at) > depth[task]:
            found.append(
                Violation("start", f"{graph.describe(task)} starts at {_s(given)}, its earliest start is {_s(at)}")
            )
    return found


def _check_memory(graph: TaskGraph, costs: _Costs, start: list[int]) -> list[Violation]:
    """Sum what is held over half-open spans: what ends at a time is free for what starts then."""
    if graph.capacity_bytes is None:
        return []
    end = [s + d for s, d in zip(start, costs.duration, strict=True)]
    parts: dict[int, dict[str, int]] = defaultdict(dict)
    for task, (kind, pair) in enumerate(zip(graph.kind.tolist(), graph.pair.tolist(), strict=True)):
        parts[pair][KIND_NAMES[kind]] = task
    spans: list[list[tuple[int, int, int]]] = [[] for _ in range(graph.num_ranks)]
    for pair, tasks in parts.items():
        first = tasks["F"]
        rank = int(graph.rank[first])
        last = tasks.get("B", tasks.get("I", first))
        spans[rank].append((start[first], end[last], costs.activation[pair]))
        if "W" in tasks:
            spans[rank].append((end[last], end[tasks["W"]], costs.weight_gradient[pair]))
    for source, target, held in zip(
        graph.edge_source.tolist(), graph.edge_target.tolist(), graph.edge_bytes.tolist(), strict=True
    ):
        if held:
            spans[int(graph.rank[source])].append((end[source], end[target], held))
    found = []
    for rank in range(graph.num_ranks):
        change: dict[int, int] = defaultdict(int)
        for begin, finish, held in spans[rank]:
            if begin < finish:
                change[begin] += held
                change[finish] -= held
        used, capacity = int(graph.static_bytes[rank]), int(graph.capacity_bytes[rank])
        worst, when = used, 0
        for at in sorted(change):
            used += change[at]
            if used > worst:
                worst, when = used, at
        if worst > capacity:
            running = next(
                (t for t in range(graph.num_tasks) if graph.rank[t] == rank and start[t] <= when < end[t]), None
            )
            during = "" if running is None else f" during {graph.describe(running)}, pair {int(graph.pair[running])}"
            found.append(
                Violation(
                    "memory", f"rank {rank} holds {worst} bytes at {_s(when)}{during}; its capacity is {capacity}"
                )
            )
    return found


def _check_host(graph: TaskGraph, costs: _Costs, start: list[int]) -> list[Violation]:
    """Sum what lies on the host, from the start of a pair's F to the end of its B or I."""
    if graph.host_capacity_bytes is None:
        return []
    change: list[dict[int, int]] = [defaultdict(int) for _ in range(graph.num_ranks)]
    last: dict[int, int] = {}
    for task, (kind, pair) in enumerate(zip(graph.kind.tolist(), graph.pair.tolist(), strict=True)):
        if KIND_NAMES[kind] == "F":
            change[int(graph.rank[task])][start[task]] += costs.host[pair]
            last.setdefault(pair, task)
        elif KIND_NAMES[kind] in ("B", "I"):
            last[pair] = task
    for pair, task in last.items():
        change[int(graph.rank[task])][start[task] + costs.duration[task]] -= costs.host[pair]
    found = []
    for rank, moments in enumerate(change):
        used, capacity = 0, int(graph.host_capacity_bytes[rank])
        worst, when = 0, 0
        for at in sorted(moments):
            used += moments[at]
            if used > worst:
                worst, when = used, at
        if worst > capacity:
            problem = f"rank {rank} holds {worst} bytes on the host at {_s(when)}; its capacity there is {capacity}"
            found.append(Violation("memory", problem))
    return found


def _s(nanoseconds: int) -> str:
    return f"{nanoseconds / NS_PER_S:.9f} s"


def require_feasible(graph: TaskGraph, schedule: Schedule, timeline: Timeline | None = None) -> None:
    """Raise an `InputError` that names the first violation, if there is one."""
    found = check(graph, schedule, timeline)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise InputError("schedule", f"{found[0]}{more}")
