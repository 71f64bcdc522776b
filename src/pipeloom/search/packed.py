"""A task graph in the form that the kernels read: one row of numbers per task, priority groups, and components.

All segments of a *group* have the same priority. They belong to one module, microbatch and direction and have the same
depth, so their relative order does not matter (DIP §5.1). A *component* is a connected part of the graph, usually
a microbatch. It must be able to finish without the other components.

For list scheduling, tasks are also packed such that the data of one step is contiguous. A *cell* is the place of a task
in the packed arrays. The cells of a segment are sorted by rank, so a task has cell ``base[pass_id] + rank``, and
neighbors in a chain share a cache line. A *link* encodes an edge as one number: the place at which the successor
queues, its segment, and its join number. A *join* is a task with several predecessors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError
from pipeloom.search.components import MOST_STATES, Components, Walks, find_components, memory_demand
from pipeloom.search.kernels.graph import depths, mark_implied
from pipeloom.taskgraph import FORWARD, WEIGHT_GRADIENT, IntArray, TaskGraph
from pipeloom.taskgraph.rows import row_start
from pipeloom.timeline import longest_paths
from pipeloom.timeline.residence import quick_topological_order

PLACE_BITS, JOIN_BITS, SEGMENT_BITS = 16, 24, 23
"""Widths of the fields of a link, lowest first. A place is four times the rank plus the class. Join 0 means no join."""
MOST_UNEQUAL = 1.3
"""Passes of one group get separate priorities when their work differs by more than this factor."""
COLUMNS = 8
DURATION, TAIL, PLACE, FIRST_SUCCESSOR, PEAK, NET, COMPONENT, SEGMENT = range(COLUMNS)
"""Columns of ``PackedGraph.task``. PLACE is four times the rank plus the class (0 F, 1 B or I, 2 W)."""


class PackedGraph(NamedTuple):
    """The arrays that list scheduling reads, int64 unless declared otherwise.

    Attributes
    ----------
    task : array, shape (num_tasks + 1, COLUMNS)
        Columns as above. PEAK is the number of bytes that a task needs in addition to those that its rank holds. NET
        is the change that remains after the task.
    successor : array, shape (num_edges, 2)
        Successor and delay. Omits an edge from F to its backward if a longer path implies it.
    waiting : array, shape (num_tasks,)
        Number of predecessors.
    base : array of int32, shape (num_segments,)
        A task has cell ``base[pass_id] + rank``.
    number : array, shape (num_cells,)
        Task of each cell; -1 if the cell is empty.
    record : array, shape (2 * num_cells,)
        Duration and link of each cell. Link -1 means no successor. A link below -1 is ``-2 - row``, where ``row`` is
        the first row of the task in ``extra``.
    extra : array
        Pairs of link and delay, for tasks with several successors or with a delay, from row 1 on. -1 ends a list.
    join_waiting : array, shape (num_joins,)
        Number of predecessors of each join.
    source_link : array
        Links to tasks without predecessors.
    bytes : array, shape (2 * num_cells,)
        PEAK and NET by cell.
    class_start : array, shape (4,)
        Segments of class c have positions ``class_start[c]`` to ``class_start[c + 1]`` in an order.
    group_start, group_segment : array
        Segments of every group in compressed rows: forward groups, then backward groups.
    weight_start, weight_segment : array
        W segments of every group in compressed rows.
    num_groups : array, shape (2,)
        Number of forward and of backward groups.
    capacity : array, shape (num_ranks,)
        Capacity minus static bytes. Very large if the rank has no limit.
    demand : array, shape (num_components, num_ranks)
        Bytes that a component needs to finish alone; see `Components`.
    scan_start, scan_cell : array
        Cells of the tasks of each component and rank, in the component's reference order, if ``demand`` requires a
        scan of them. Empty if ``demand`` is the sum over the remaining tasks.
    """

    task: IntArray
    successor: IntArray
    waiting: IntArray
    base: IntArray
    number: IntArray
    record: IntArray
    extra: IntArray
    join_waiting: IntArray
    source_link: IntArray
    bytes: IntArray
    component: npt.NDArray[np.int32]
    class_start: IntArray
    group_start: IntArray
    group_segment: IntArray
    weight_start: IntArray
    weight_segment: IntArray
    num_groups: IntArray
    group_microbatch: IntArray
    capacity: IntArray
    work: IntArray
    least_tail: IntArray
    demand: IntArray
    scan_start: IntArray
    scan_cell: IntArray
    component_size: IntArray


class Groups(NamedTuple):
    """Properties of groups, for the heuristics: arrays over forward groups, then backward groups."""

    microbatch: IntArray
    module: IntArray
    depth: IntArray
    first: IntArray
    """Position of the first task of the group in a topological order that finishes one microbatch before the next."""
    work: IntArray
    head: IntArray
    tail: IntArray
    ends: IntArray
    """Whether the group is backward and no backward of another segment depends on it."""


def pack_graph(
    graph: TaskGraph, walks: Walks | None = None, states: int = MOST_STATES
) -> tuple[PackedGraph, Groups, Components]:
    """Pack a graph without candidates for the kernels; ``walks`` and ``states`` are those of `find_components`."""
    components = find_components(graph, walks, states)
    topological = quick_topological_order(graph)
    position = np.empty(graph.num_tasks, np.int64)
    position[topological] = np.arange(graph.num_tasks)
    kind_class = np.where(graph.kind == FORWARD, 0, np.where(graph.kind == WEIGHT_GRADIENT, 2, 1)).astype(np.int64)
    head, tail = longest_paths(graph, graph.duration_ns)
    peak, net = memory_demand(graph)

    keep = ~_implied(graph, topological, position)
    source = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_start))[keep]
    successor = np.stack([graph.successor[keep], graph.successor_delay_ns[keep]], axis=1)
    first_successor = row_start(source, graph.num_tasks)
    waiting = np.bincount(successor[:, 0], minlength=graph.num_tasks).astype(np.int64)

    task = np.zeros((graph.num_tasks + 1, COLUMNS), np.int64)
    columns = {
        DURATION: graph.duration_ns,
        TAIL: tail,
        PLACE: 4 * graph.rank + kind_class,
        PEAK: peak,
        NET: net,
        COMPONENT: components.component_of_task,
        SEGMENT: graph.pass_id,
    }
    for column, values in columns.items():
        task[:-1, column] = values
    task[:, FIRST_SUCCESSOR] = first_successor

    successor = np.ascontiguousarray(successor)
    fields, cell = _pack_cells(
        graph.pass_id, task[:-1, PLACE], graph.duration_ns, first_successor, successor, waiting, graph.num_passes
    )
    num_cells = len(fields["number"])
    memory, component = np.zeros((num_cells, 2), np.int64), np.zeros(num_cells, np.int32)
    memory[cell], component[cell] = task[:-1, PEAK : NET + 1], components.component_of_task
    grouped = _groups(graph, kind_class, topological, position, head, tail)
    groups, group_rows, weight_rows, num_groups, class_start = grouped
    least_tail = np.array([tail[graph.rank == r].min(initial=1 << 60) for r in range(graph.num_ranks)])
    packed = PackedGraph(
        task=task,
        successor=successor,
        waiting=waiting,
        **fields,
        bytes=memory.ravel(),
        component=component,
        class_start=class_start,
        group_start=group_rows[0],
        group_segment=group_rows[1],
        weight_start=weight_rows[0],
        weight_segment=weight_rows[1],
        num_groups=num_groups,
        group_microbatch=groups.microbatch.astype(np.int64),
        capacity=components.capacity,
        work=np.bincount(graph.rank, weights=graph.duration_ns, minlength=graph.num_ranks).astype(np.int64),
        least_tail=np.where(least_tail == 1 << 60, 0, least_tail),
        demand=components.demand,
        scan_start=components.scan_start,
        scan_cell=cell[components.scan_task],
        component_size=np.bincount(components.component_of_task).astype(np.int64),
    )
    return packed, groups, components


def _pack_cells(
    pass_id: IntArray,
    place: IntArray,
    duration: IntArray,
    first_successor: IntArray,
    successor: IntArray,
    waiting: IntArray,
    num_passes: int,
) -> tuple[dict[str, IntArray], IntArray]:
    """Pack tasks by cell; return fields of `PackedGraph` and the cell of every task."""
    num_tasks = len(pass_id)
    rank = place >> 2
    if int(place.max()) >= 1 << PLACE_BITS or num_passes >= 1 << SEGMENT_BITS or num_tasks >= 1 << JOIN_BITS:
        raise InputError(
            "instance", f"{num_tasks} tasks on {int(rank.max()) + 1} ranks are more than the search can number"
        )
    lowest = np.full(num_passes, 1 << PLACE_BITS, np.int64)
    np.minimum.at(lowest, pass_id, rank)
    highest = np.full(num_passes, -1, np.int64)
    np.maximum.at(highest, pass_id, rank)
    width = np.maximum(highest - lowest + 1, 0)
    base = np.cumsum(width) - width - np.where(width > 0, lowest, 0)
    cell = base[pass_id] + rank
    number = np.full(int(width.sum()), -1, np.int64)
    number[cell] = np.arange(num_tasks)

    joins = np.flatnonzero(waiting > 1)
    join_of = np.zeros(num_tasks, np.int64)
    join_of[joins] = 1 + np.arange(len(joins))
    link_to = pass_id << (PLACE_BITS + JOIN_BITS) | join_of << PLACE_BITS | place

    count = np.diff(first_successor)
    source = np.repeat(np.arange(num_tasks), count)
    long = count > 1
    long[source[successor[:, 1] > 0]] = True
    link = np.full(num_tasks, -1, np.int64)
    short = ~long & (count == 1)
    link[short] = link_to[successor[first_successor[:-1][short], 0]]
    # Each list has one entry per successor and one for its end.
    length = np.where(long, count + 1, 0)
    row = 1 + np.cumsum(length) - length
    link[long] = -2 - row[long]
    extra = np.full((int(length.sum()) + 1, 2), -1, np.int64)
    inside = long[source]
    where = (row[source] + np.arange(len(source)) - first_successor[source])[inside]
    extra[where, 0] = link_to[successor[inside, 0]]
    extra[where, 1] = successor[inside, 1]

    record = np.zeros((len(number), 2), np.int64)
    record[cell, 0], record[cell, 1] = duration, link
    fields = {
        "base": base.astype(np.int32),
        "number": number,
        "record": record.ravel(),
        "extra": extra.ravel(),
        "join_waiting": waiting[joins],
        "source_link": link_to[waiting == 0],
    }
    return fields, cell


def turn_of_task(graph: TaskGraph) -> IntArray:
    """Return the turn of every task's microbatch, from 0. Numbers of microbatches may have gaps of any size."""
    turn: IntArray = np.unique(graph.microbatch, return_inverse=True)[1]
    return turn


def _groups(
    graph: TaskGraph, kind_class: IntArray, topological: IntArray, position: IntArray, head: IntArray, tail: IntArray
) -> tuple[Groups, tuple[IntArray, IntArray], tuple[IntArray, IntArray], IntArray, IntArray]:
    """Sort segments into groups and order the groups as a microbatch passes through them."""
    num_passes = graph.num_passes
    segment_class = np.full(num_passes, -1, np.int64)
    segment_class[graph.pass_id] = kind_class
    microbatch, module = np.zeros(num_passes, np.int64), np.zeros(num_passes, np.int64)
    microbatch[graph.pass_id], module[graph.pass_id] = turn_of_task(graph), graph.module
    first = np.full(num_passes, graph.num_tasks, np.int64)
    np.minimum.at(first, graph.pass_id, position)
    depth = depths(
        graph.pass_id,
        microbatch,
        module,
        segment_class,
        topological,
        graph.predecessor_start,
        graph.predecessor,
        np.zeros(num_passes, np.int64),
    )
    work = np.bincount(graph.pass_id, weights=graph.duration_ns, minlength=num_passes).astype(np.int64)
    grouped = np.flatnonzero((segment_class == 0) | (segment_class == 1))
    columns = (first, depth, module, microbatch, segment_class)
    grouped = grouped[np.lexsort(tuple(column[grouped] for column in columns))]
    new = np.ones(len(grouped), np.bool_)
    for column in columns[1:]:
        new[1:] &= column[grouped[1:]] == column[grouped[:-1]]
    new[1:] = ~new[1:]
    begin = np.flatnonzero(new)
    if len(begin):
        mixed = np.maximum.reduceat(work[grouped], begin) > MOST_UNEQUAL * np.minimum.reduceat(work[grouped], begin)
        new |= mixed[np.cumsum(new) - 1]
        begin = np.flatnonzero(new)
    # Sort groups by class, microbatch and first task. Their segments keep their order.
    leader = grouped[begin]
    by_leader = np.lexsort((first[leader], microbatch[leader], segment_class[leader]))
    place = np.empty(len(begin), np.int64)
    place[by_leader] = np.arange(len(begin))
    group = place[np.cumsum(new) - 1] if len(begin) else np.zeros(0, np.int64)
    grouped = grouped[np.argsort(group, kind="stable")]
    group = np.sort(group)
    leader = leader[by_leader]
    start = row_start(group, len(leader))
    group_of_segment = np.full(num_passes, -1, np.int64)
    group_of_segment[grouped] = group
    weights = np.flatnonzero(segment_class == 2)
    owner = group_of_segment[_backward_segment(graph)[weights]]
    weights, owner = (column[np.lexsort((first[weights], owner))] for column in (weights, owner))
    segment_head = np.full(num_passes, 1 << 60, np.int64)
    np.minimum.at(segment_head, graph.pass_id, head)
    segment_tail = np.zeros(num_passes, np.int64)
    np.maximum.at(segment_tail, graph.pass_id, tail + graph.duration_ns)
    ends = _ends(graph, kind_class, segment_class)

    def of_groups(function: np.ufunc, values: IntArray) -> IntArray:
        answer: IntArray = function.reduceat(values[grouped], start[:-1]) if len(leader) else values[:0]
        return answer

    groups = Groups(
        microbatch=microbatch[leader],
        module=module[leader],
        depth=depth[leader],
        first=of_groups(np.minimum, first),
        work=of_groups(np.add, work),
        head=of_groups(np.minimum, segment_head),
        tail=of_groups(np.maximum, segment_tail),
        ends=of_groups(np.minimum, ends),
    )
    num_groups = np.bincount(segment_class[leader], minlength=2).astype(np.int64)
    counts = [int((segment_class == c).sum()) for c in range(3)]
    class_start = np.cumsum([0, *counts]).astype(np.int64)
    rows = (start, grouped), (row_start(owner, len(leader)), weights)
    return groups, *rows, num_groups, class_start


def _backward_segment(graph: TaskGraph) -> IntArray:
    """Return the segment of the backwards for every segment of weight gradients, which belongs to the same group."""
    a_task = np.zeros(graph.num_passes, np.int64)
    a_task[graph.pass_id] = np.arange(graph.num_tasks)
    found: IntArray = graph.pass_id[graph.backward_of[graph.pair[a_task]]]
    return found


def _ends(graph: TaskGraph, kind_class: IntArray, segment_class: IntArray) -> IntArray:
    """Return 1 for every backward segment on which no backward of another segment depends, and 0 for the others."""
    source = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_start))
    both = (kind_class[source] == 1) & (kind_class[graph.successor] == 1)
    both &= graph.pass_id[source] != graph.pass_id[graph.successor]
    ends: IntArray = (segment_class == 1).astype(np.int64)
    ends[graph.pass_id[source[both]]] = 0
    return ends


def _implied(graph: TaskGraph, topological: IntArray, position: IntArray) -> npt.NDArray[np.bool_]:
    """Return which rows of ``graph.successor`` are edges from F to its own backward that a longer path implies."""
    source = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_start))
    own = (graph.backward_of[graph.pair[source]] == graph.successor) & (graph.kind[source] == FORWARD)
    own &= graph.successor_delay_ns == 0
    implied = np.zeros(len(source), np.bool_)
    mark_implied(
        np.flatnonzero(own),
        source,
        graph.successor,
        graph.successor_start,
        topological,
        position,
        np.zeros(graph.num_tasks, np.bool_),
        implied,
        200_000_000,
    )
    return implied
