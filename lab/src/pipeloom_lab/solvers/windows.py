"""Large-neighbourhood search: CP-SAT orders the tasks of a short window of time anew, the rest stays as it is.

The window's model knows when each task can begin at the earliest, what must follow it until the end of all, and what
memory the pairs that are under way hold. Times are coarse there and rounded up, so what is shorter there is shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError
from pipeloom.search.budget import Stretch
from pipeloom.search.phases import default
from pipeloom.search.state import Search
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph
from pipeloom.timeline import Schedule, Timeline, check, memory_changes, simulate
from pipeloom_lab.solvers import exact_worker

TASKS = 40
"""Mean number of tasks in a window: CP-SAT proves most such windows in a fraction of a second."""
SECONDS = 0.3
"""For one window at most."""
STEPS = 200_000
"""A window's times are in so many parts of its length."""
FOREVER = 4 * STEPS
BEGIN = 0.5
"""Part of the time after which the method turns to windows."""


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """What CP-SAT gets, tasks numbered from 0, times in steps from the window's begin.

    Attributes
    ----------
    tasks : array
        The graph's numbers.
    rank, length, head, tail, hint : array, shape (num_tasks,)
        ``head`` before which a task cannot begin; ``tail`` from its end to the end of all.
    edges : list of (int, int, int)
        Tasks and delay.
    holds : list of (int, int, int, int, bool)
        Rank, bytes, task with which the bytes are taken (-1: held from the begin), task at whose end they are given
        back (-1: not within the window), and whether they are taken at the task's start or at its end.
    limit : int
        Steps to the end of all as it is; only what ends sooner is asked for.
    """

    tasks: IntArray
    rank: IntArray
    length: IntArray
    head: IntArray
    tail: IntArray
    hint: IntArray
    edges: list[tuple[int, int, int]]
    holds: list[tuple[int, int, int, int, bool]]
    capacity: list[int]
    limit: int


def search_windows(search: Search, stretch: Stretch) -> None:
    """Improve the incumbent window by window, at random moments, until the budget (or its stretch) is spent.

    Raises
    ------
    InputError
        OR-Tools is not installed.
    """
    if find_spec("ortools") is None:
        raise InputError("method", "windows needs OR-Tools, not installed here", "pip install 'pipeloom-lab[exact]'")
    graph = search.graph
    orders = search.orders()
    while not search.done and search.meter.spent < stretch.until:
        timeline = simulate(graph, Schedule(orders))
        width = int(search.best_ns * TASKS / graph.num_tasks)
        begin = int(search.random.integers(0, max(1, search.best_ns - width // 2)))
        inside = (timeline.start_ns >= begin) & (timeline.start_ns < begin + width)
        search.meter.used += 1
        if inside.sum() < 2:
            continue
        answer, spent_s = _ask(cut(graph, orders, timeline, inside, begin), int(search.random.integers(1 << 30)))
        if search.meter.budget.clock == "cpu":
            # The worker's time counts too.
            search.meter.add(spent_s)
        if answer is None:
            continue
        changed = _reorder(orders, timeline, inside, answer)
        if check(graph, Schedule(changed)):
            continue  # possible only through rounding and tasks that last no time
        found = simulate(graph, Schedule(changed))
        if found.makespan_ns <= search.best_ns:
            orders = changed
        if found.makespan_ns < search.best_ns:
            search.keep(found.makespan_ns, _sequence(graph, orders, found))


def cut(
    graph: TaskGraph, orders: tuple[IntArray, ...], timeline: Timeline, inside: npt.NDArray[np.bool_], begin: int
) -> Window:
    """Cut a window out of a schedule."""
    tasks = np.flatnonzero(inside)
    number = {int(t): i for i, t in enumerate(tasks.tolist())}
    step = max(1, (timeline.makespan_ns - begin) // STEPS)
    start, end = timeline.start_ns, timeline.end_ns
    head = np.full(len(tasks), begin, np.int64)
    edges = []
    for i, t in enumerate(tasks.tolist()):
        for e in range(graph.predecessor_start[t], graph.predecessor_start[t + 1]):
            before, delay = int(graph.predecessor[e]), int(graph.predecessor_delay_ns[e])
            if before in number:
                edges.append((number[before], i, -(-delay // step)))
            else:
                head[i] = max(head[i], end[before] + delay)
    tails = _tails(graph, orders, timeline, inside)
    holds: list[tuple[int, int, int, int, bool]] = []
    capacity = [int(FOREVER)] * graph.num_ranks
    at_start, at_end = memory_changes(graph)
    for rank, order in enumerate(orders):
        mine = np.flatnonzero(inside[order])
        if not mine.size:
            continue
        first, behind = int(mine[0]), int(mine[-1]) + 1
        free_at = end[order[first - 1]] if first else 0
        after = graph.duration_ns[order[behind]] + tails[order[behind]] if behind < len(order) else 0
        for t in order[mine].tolist():
            head[number[t]] = max(head[number[t]], free_at)
            tails[t] = max(tails[t], after)
        if graph.headroom_bytes is not None:
            capacity[rank] = int(graph.headroom_bytes[rank])
            held = int((at_start + at_end)[order[:first]].sum())
            holds += _holds(graph, rank, number, held)
    return Window(
        tasks,
        graph.rank[tasks],
        -(-graph.duration_ns[tasks] // step),
        -(-(head - begin) // step),
        -(-tails[tasks] // step),
        (start[tasks] - begin) // step,
        edges,
        holds,
        capacity,
        (timeline.makespan_ns - begin) // step,
    )


def _tails(
    graph: TaskGraph, orders: tuple[IntArray, ...], timeline: Timeline, inside: npt.NDArray[np.bool_]
) -> IntArray:
    """From the end of every task to the end of all by paths that leave the window at once, orders kept outside it."""
    follower = np.full(graph.num_tasks, NO_TASK, np.int64)
    for order in orders:
        follower[order[:-1]] = order[1:]
    tail = np.zeros(graph.num_tasks, np.int64)
    for t in _sequence(graph, orders, timeline)[::-1].tolist():
        most = 0
        for e in range(graph.successor_start[t], graph.successor_start[t + 1]):
            after = graph.successor[e]
            if not inside[after]:
                most = max(most, int(graph.successor_delay_ns[e] + graph.duration_ns[after] + tail[after]))
        after = follower[t]
        if after != NO_TASK and not inside[t] and not inside[after]:
            most = max(most, int(graph.duration_ns[after] + tail[after]))
        tail[t] = most
    return tail


def _holds(graph: TaskGraph, rank: int, number: dict[int, int], held: int) -> list[tuple[int, int, int, int, bool]]:
    """Bytes of pairs and edges that change hands inside the window; the rest of ``held`` stays all the time."""
    spans: list[tuple[int, int, int, bool]] = []
    for pair in np.flatnonzero(graph.rank[graph.forward_of] == rank).tolist():
        forward, back, weight = (int(x[pair]) for x in (graph.forward_of, graph.backward_of, graph.weight_of))
        last = forward if back == NO_TASK else back
        spans.append((int(graph.activation_bytes[pair]), forward, last, True))
        if weight != NO_TASK:
            spans.append((int(graph.weight_gradient_bytes[pair]), back, weight, False))
    for edge in np.flatnonzero((graph.edge_bytes > 0) & (graph.rank[graph.edge_source] == rank)).tolist():
        source, target = int(graph.edge_source[edge]), int(graph.edge_target[edge])
        spans.append((int(graph.edge_bytes[edge]), source, target, False))
    holds = []
    for amount, first, last, at_start in spans:
        begins, ends = number.get(first, -1), number.get(last, -1)
        if begins < 0 and ends < 0:
            continue
        if begins < 0:
            held -= amount
        holds.append((rank, amount, begins, ends, at_start))
    holds.append((rank, held, -1, -1, True))
    return holds


def _sequence(graph: TaskGraph, orders: tuple[IntArray, ...], timeline: Timeline) -> IntArray:
    """All tasks in an order that every rank can follow."""
    place = np.empty(graph.num_tasks, np.int64)
    for order in orders:
        place[order] = np.arange(len(order))
    sequence: IntArray = np.lexsort((place, timeline.end_ns, timeline.start_ns))
    return sequence


def _reorder(
    orders: tuple[IntArray, ...], timeline: Timeline, inside: npt.NDArray[np.bool_], starts: IntArray
) -> tuple[IntArray, ...]:
    """The orders with the window's tasks, which follow one another on every rank, sorted by new starts."""
    when = np.zeros(len(inside), np.int64)
    when[inside] = starts
    changed = []
    for order in orders:
        row, mine = order.copy(), np.flatnonzero(inside[order])
        tasks = order[mine]
        row[mine] = tasks[np.lexsort((timeline.start_ns[tasks], when[tasks]))]
        changed.append(row)
    return tuple(changed)


def _ask(window: Window, seed: int) -> tuple[IntArray | None, float]:
    """Starts of the window's tasks, and the processor time of the worker that found them."""
    begin_s = exact_worker.spent_s()
    answer: IntArray | None = exact_worker.call("windows.solve_window", window, seed)
    return answer, exact_worker.spent_s() - begin_s


def solve_window(window: Window, seed: int, seconds: float = SECONDS) -> IntArray | None:
    """Order one window with CP-SAT; None if there is nothing better, or it was not found in time."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    count = len(window.tasks)
    start = [model.new_int_var(int(window.head[i]), FOREVER, "") for i in range(count)]
    end: list[Any] = [start[i] + int(window.length[i]) for i in range(count)]
    last = model.new_int_var(0, window.limit - 1, "")
    by_rank: dict[int, list[Any]] = {}
    for i in range(count):
        model.add_hint(start[i], int(window.hint[i]))
        model.add(last >= end[i] + int(window.tail[i]))
        interval = model.new_interval_var(start[i], int(window.length[i]), end[i], "")
        by_rank.setdefault(int(window.rank[i]), []).append(interval)
    for row in by_rank.values():
        model.add_no_overlap(row)
    for before, after, delay in window.edges:
        model.add(start[after] >= end[before] + delay)
    spans: dict[int, tuple[list[Any], list[int]]] = {}
    for rank, amount, begins, ends, at_start in window.holds:
        if amount <= 0:
            continue
        first = 0 if begins < 0 else start[begins] if at_start else end[begins]
        final = 2 * FOREVER if ends < 0 else end[ends]
        size = model.new_int_var(0, 2 * FOREVER, "")
        intervals, amounts = spans.setdefault(rank, ([], []))
        intervals.append(model.new_interval_var(first, size, final, ""))
        amounts.append(amount)
    for rank, (intervals, amounts) in spans.items():
        model.add_cumulative(intervals, amounts, window.capacity[rank])
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return np.array([solver.value(x) for x in start], np.int64)


def default_then_windows(search: Search, stretch: Stretch) -> None:
    """The default for a part of the time, then windows; only where memory is tight, for elsewhere they win nothing."""
    mine = Stretch(search.meter.spent, stretch.until)
    default(search, mine.first(BEGIN if search.limited else 1.0))
    search_windows(search, mine)
