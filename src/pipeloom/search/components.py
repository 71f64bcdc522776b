"""Components: parts of a graph that can finish alone, and the memory they need to do so, for banker's admission.

The banker grants memory only if all components that have begun can still finish, one after the other, in some order
(Dijkstra's banker's algorithm). A component finishes in its *reference order*. Whichever of its tasks have run, the
rest of that order can run. `demand` is the peak of the rest on each rank, in bytes above those that the component
holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeloom.errors import InfeasibleError, NothingFoundError
from pipeloom.search.kernels.graph import join, walk
from pipeloom.taskgraph import FORWARD, WEIGHT_GRADIENT, BoolArray, IntArray, TaskGraph, topological_order
from pipeloom.taskgraph.rows import row_start
from pipeloom.timeline import memory_changes
from pipeloom.timeline.options import fits_alone, least_held, pair_options
from pipeloom.timeline.residence import quick_topological_order
from pipeloom.units import exact_size_text

NO_LIMIT = 1 << 60
MOST_STATES = 20_000
"""Maximum number of sets of finished tasks that are tried for a component."""


@dataclass(frozen=True, slots=True, eq=False)
class Components:
    """Components of a graph, in the order of their first microbatch.

    Attributes
    ----------
    order : array, shape (num_tasks,)
        All tasks, component after component in order of their first microbatch, each component in its reference order.
        It fits into memory.
    scan_start, scan_task : array
        Tasks of each component and rank (row ``component * num_ranks + rank``) in reference order, if the demand is not
        the sum over the remaining tasks.
    """

    component_of_task: IntArray
    order: IntArray
    demand: IntArray
    capacity: IntArray
    scan_start: IntArray
    scan_task: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Walks:
    """The part of the search for components that is the same under all candidates of a graph.

    ``order`` has all tasks, component after component, each depth first with backwards as early as possible.
    """

    component_of_task: IntArray
    order: IntArray


def make_walks(graph: TaskGraph) -> Walks:
    """Split a graph into components and find a depth-first order of each."""
    component_of_task = label_components(graph)
    members = np.argsort(component_of_task, kind="stable")
    member_start = np.searchsorted(component_of_task[members], np.arange(int(component_of_task.max(initial=-1)) + 2))
    order, stacks = np.empty(graph.num_tasks, np.int64), np.empty((2, graph.num_tasks), np.int64)
    waiting = np.diff(graph.predecessor_start)
    walk(graph.successor_start, graph.successor, graph.kind, waiting, members, member_start, stacks, order)
    return Walks(component_of_task, order)


def find_components(graph: TaskGraph, walks: Walks | None = None, states: int = MOST_STATES) -> Components:
    """Split a graph without candidates into components and find an order for each that fits.

    Parameters
    ----------
    walks : Walks, optional
        Walks of this graph under any candidates.
    states : int
        Maximum number of sets of finished tasks to try for a component if the simple orders do not fit. This may take
        seconds.

    Raises
    ------
    InfeasibleError
        A pair alone is too large, or no order of its component fits. The message names the pair, rank and bytes.
    NothingFoundError
        No order of a component was found that fits, and not all orders were tried.
    """
    capacity = np.full(graph.num_ranks, NO_LIMIT, np.int64)
    if graph.headroom_bytes is not None:
        capacity = graph.headroom_bytes
    if not memory_matters(graph):
        return _one_component(graph, capacity)
    refuse_large_pairs(graph)
    walks = walks or make_walks(graph)
    component_of_task, order = walks.component_of_task, walks.order
    demand, adds_up = _demand(graph, component_of_task, order)
    failing = np.flatnonzero((demand > capacity).any(axis=1))
    if failing.size:
        order = order.copy()
        reader = _Reader(graph)
        for component in failing.tolist():
            here = component_of_task[order] == component
            order[here] = _reference_order(graph, reader, order[here].tolist(), capacity, states)
        demand, adds_up = _demand(graph, component_of_task, order)
    # Each row has the tasks of one component and rank, in the order of the component.
    row = (component_of_task * graph.num_ranks + graph.rank)[order]
    scanned = ~adds_up[row]
    start, by_row = row_start(row[scanned], len(adds_up)), np.argsort(row[scanned], kind="stable")
    return Components(component_of_task, order, demand, capacity, start, order[scanned][by_row])


def _demand(graph: TaskGraph, component_of_task: IntArray, order: IntArray) -> tuple[IntArray, BoolArray]:
    """Return the peak bytes of each component on each rank along the order, shape (num_components, num_ranks).

    The second result, of shape (num_components * num_ranks,), is whether the component on this rank first only takes
    memory and then only frees it. Its demand is then a sum.
    """
    num_components = int(component_of_task.max(initial=-1)) + 1
    row = (component_of_task * graph.num_ranks + graph.rank)[order]
    by_row = np.argsort(row, kind="stable")
    peak, net = (column[order][by_row] for column in memory_demand(graph))
    row = row[by_row]
    first = np.flatnonzero(np.diff(row, prepend=-1))
    length = np.diff(first, append=len(row))

    def before(values: IntArray) -> IntArray:
        """Return for each value the sum of the earlier values in the same row."""
        total = np.cumsum(values) - values
        earlier: IntArray = total - np.repeat(total[first], length)
        return earlier

    demand = np.zeros(num_components * graph.num_ranks, np.int64)
    taking = (net > 0) | (peak > 0)
    uneven = taking & ((before((~taking & (net < 0)).astype(np.int64)) > 0) | (peak != net))
    adds_up = np.ones(len(demand), np.bool_)
    if len(row):
        demand[row[first]] = np.maximum(0, np.maximum.reduceat(before(net) + peak, first))
        adds_up[row[first]] = ~np.logical_or.reduceat(uneven, first)
    return demand.reshape(num_components, graph.num_ranks), adds_up


def memory_demand(graph: TaskGraph) -> tuple[IntArray, IntArray]:
    """Return the peak and net change of bytes of every task.

    Bytes held for no time do not count. The peak of a task without duration is therefore its net change.
    """
    at_start, at_end = memory_changes(graph)
    net = at_start + at_end
    return np.where(graph.duration_ns == 0, net, np.maximum(at_start, net)), net


def memory_matters(graph: TaskGraph) -> bool:
    """Return whether the maxima of all pairs and the bytes of all edges together exceed the memory.

    The demand of a component along its reference order is not sufficient for this check, because another order may hold
    more at once.
    """
    if graph.capacity_bytes is None:
        return False
    most = graph.static_bytes.copy()
    home = graph.rank[graph.forward_of]
    np.add.at(most, home, np.maximum(graph.activation_bytes, graph.weight_gradient_bytes))
    np.add.at(most, graph.rank[graph.edge_source], graph.edge_bytes)
    return bool((most > graph.capacity_bytes).any())


def _one_component(graph: TaskGraph, capacity: IntArray) -> Components:
    """Return one component that needs no memory. This is fast for large graphs."""
    none = np.zeros(0, np.int64)
    # The list scheduler in plain Python needs no compilation, but is too slow for larger graphs.
    order = topological_order(graph) if graph.num_tasks <= 4000 else quick_topological_order(graph)
    return Components(
        np.zeros(graph.num_tasks, np.int64),
        order,
        np.zeros((1, graph.num_ranks), np.int64),
        capacity,
        np.zeros(graph.num_ranks + 1, np.int64),
        none,
    )


class _Reader:
    """The rows of the graph as lists, which Python reads faster than arrays."""

    def __init__(self, graph: TaskGraph) -> None:
        self.rank: list[int] = graph.rank.tolist()
        self.kind: list[int] = graph.kind.tolist()
        self.start: list[int] = graph.successor_start.tolist()
        self.successor: list[int] = graph.successor.tolist()
        self.waiting: list[int] = np.diff(graph.predecessor_start).tolist()
        self.peak, self.net = (column.tolist() for column in memory_demand(graph))


def label_components(graph: TaskGraph) -> IntArray:
    """Label connected components, numbered by their smallest (microbatch, task)."""
    root = np.arange(graph.num_tasks)
    join(graph.successor_start, graph.successor, root)
    by_microbatch = np.argsort(graph.microbatch, kind="stable")
    roots, first, part = np.unique(root[by_microbatch], return_index=True, return_inverse=True)
    number = np.empty(len(roots), np.int64)
    number[np.argsort(first)] = np.arange(len(roots))
    component = np.empty(graph.num_tasks, np.int64)
    component[by_microbatch] = number[part]
    return component


def _reference_order(graph: TaskGraph, reader: _Reader, first: list[int], capacity: IntArray, states: int) -> list[int]:
    """Return an order that fits for a component whose walk ``first`` does not fit.

    Try the order that greedily takes the task with the smallest memory increase, and then a search.
    """
    peak, net, tasks = reader.peak, reader.net, sorted(first)
    greedy = _walk(reader, tasks)
    if (np.array(_most(reader, greedy, graph.num_ranks)) <= capacity).all():
        return greedy
    searched, exhausted = _search(reader, tasks, capacity.tolist(), states)
    if searched is not None:
        return searched
    most = _most(reader, first, graph.num_ranks)
    used = [0] * graph.num_ranks
    for task in first:
        rank = reader.rank[task]
        if used[rank] + peak[task] > capacity[rank]:
            # If tasks have no duration, more orders fit than this search considers.
            proved = exhausted and bool((graph.duration_ns > 0).all())
            some = f"at most {states} states of it were searched, not all"
            tried = "no order fits" if proved else "not proved impossible" if exhausted or not states else some
            needs, leaves = exact_size_text(most[rank]), exact_size_text(int(capacity[rank]))
            raise (InfeasibleError if proved else NothingFoundError)(
                f"pair {graph.pair[task]} ({graph.describe(task)}) does not fit: its microbatch needs "
                f"{needs} at once on rank {rank} in every order tried, and beside "
                f"{_static(graph, rank)} the capacity leaves {leaves}; {tried}"
            )
        used[rank] += net[task]
    raise AssertionError("an order that does not fit has a first task that does not")


def _most(reader: _Reader, sequence: list[int], num_ranks: int) -> list[int]:
    """Return the peak bytes of a sequence of tasks on every rank."""
    used, most = [0] * num_ranks, [0] * num_ranks
    for task in sequence:
        rank = reader.rank[task]
        most[rank] = max(most[rank], used[rank] + reader.peak[task])
        used[rank] += reader.net[task]
    return most


def _walk(reader: _Reader, tasks: list[int]) -> list[int]:
    """Return an order that greedily takes the task with the smallest memory increase."""
    peak, net = reader.peak, reader.net
    waiting = {task: reader.waiting[task] for task in tasks}
    forwards = [task for task in reversed(tasks) if waiting[task] == 0 and reader.kind[task] == FORWARD]
    backwards = [task for task in reversed(tasks) if waiting[task] == 0 and reader.kind[task] != FORWARD]
    sequence: list[int] = []
    while forwards or backwards:
        pool = min(
            (pool for pool in (backwards, forwards) if pool),
            key=lambda pool: min((max(net[t], 0), peak[t]) for t in pool),
        )
        task = pool.pop(min(range(len(pool)), key=lambda i: (max(net[pool[i]], 0), peak[pool[i]])))
        sequence.append(task)
        opened = []
        for e in range(reader.start[task], reader.start[task + 1]):
            other = reader.successor[e]
            waiting[other] -= 1
            if waiting[other] == 0:
                opened.append(other)
        for other in sorted(opened, key=lambda t: (reader.kind[t] == WEIGHT_GRADIENT, -t)):
            (forwards if reader.kind[other] == FORWARD else backwards).append(other)
    return sequence


def _search(reader: _Reader, tasks: list[int], capacity: list[int], most: int) -> tuple[list[int] | None, bool]:
    """Search depth first for an order that fits. Return it or None, and whether all orders were tried.

    The search stops after ``most`` states. A task that fits and does not increase the held bytes runs at once, since
    this never prevents another task from fitting. Only the other tasks are a choice.
    """
    peak, net = reader.peak, reader.net
    number = {task: i for i, task in enumerate(tasks)}
    predecessors = dict.fromkeys(tasks, 0)
    for task in tasks:
        for e in range(reader.start[task], reader.start[task + 1]):
            predecessors[reader.successor[e]] |= 1 << number[task]
    seen: set[int] = set()
    stack: list[tuple[int, list[int], list[int]]] = [(0, [], list(capacity))]
    while stack and len(seen) < most:
        done, sequence, free = stack.pop()
        ready = [t for t in tasks if not done >> number[t] & 1 and predecessors[t] & ~done == 0]
        fits = [t for t in ready if peak[t] <= free[reader.rank[t]]]
        harmless = [t for t in fits if net[t] <= 0]
        # The last task pushed is tried first: the one with the smallest increase.
        for task in harmless[:1] or sorted(fits, key=lambda t: (-net[t], t)):
            after = done | 1 << number[task]
            if after in seen:
                continue
            seen.add(after)
            longer = [*sequence, task]
            if len(longer) == len(tasks):
                return longer, True
            left = list(free)
            left[reader.rank[task]] -= net[task]
            stack.append((after, longer, left))
    return None, not stack


def refuse_large_pairs(graph: TaskGraph) -> None:
    """Raise `InfeasibleError` if static bytes exceed a capacity, or a pair is too large under each candidate."""
    capacity = graph.most_headroom_bytes
    if capacity is not None and graph.capacity_bytes is not None and (capacity < 0).any():
        rank = int(np.flatnonzero(capacity < 0)[0])
        most = exact_size_text(int(graph.capacity_bytes[rank]))
        raise InfeasibleError(f"rank {rank} cannot hold its {_static(graph, rank)}: its capacity is {most}")
    options = pair_options(graph)
    large = np.flatnonzero(~fits_alone(graph, options).any(axis=1))
    if large.size:
        pair = int(large[0])
        rank = int(graph.rank[graph.forward_of[pair]])
        problem = f"pair {pair} ({graph.describe(int(graph.forward_of[pair]))}) cannot fit: "
        size = int(least_held(graph, options)[pair].min())
        if capacity is not None and size > capacity[rank]:
            holds, leaves = exact_size_text(size), exact_size_text(int(capacity[rank]))
            raise InfeasibleError(
                f"{problem}it holds {holds}, and "
                f"beside {_static(graph, rank)} the capacity of rank {rank} leaves {leaves}"
            )
        raise InfeasibleError(
            f"{problem}each of its candidates holds more on rank {rank}, or more on the host, than the limits allow"
        )


def _static(graph: TaskGraph, rank: int) -> str:
    return exact_size_text(int(graph.static_bytes[rank]), "static bytes")
