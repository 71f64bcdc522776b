"""Search of large graphs on a sample: a schedule of some components is used for all similar components.

Thousands of components (mostly microbatches) differ only in their lengths. Similar components are grouped, a sample
with one component of each group is searched, and its schedule is repeated with other members of the groups. A member
replaces the component of its group task by task. No member needs more bytes than the sample assumes, so the combined
schedule fits.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InfeasibleError
from pipeloom.search.budget import WHOLE, Stretch
from pipeloom.search.packed import COMPONENT
from pipeloom.search.state import Run, Search
from pipeloom.taskgraph import FORWARD, NO_TASK, IntArray, TaskGraph
from pipeloom.taskgraph.rows import adjacency
from pipeloom.timeline import lower_bound

_Profiles = npt.NDArray[np.float64]

NO_MEMBER = -1
"""Marks a copy for which a group has no member."""


def search_sample(search: Search, stretch: Stretch, run: Run) -> None:
    """Search a sample with ``run`` and keep the resulting schedule of the whole graph if it is better.

    Do nothing if components differ so much that the sample has half of all tasks, or if the sample is so small that
    repeated warm-up and cool-down would take too long.
    """
    meter, params = search.meter, search.params.sample
    if meter.spent >= stretch.until:
        return
    copies = max(2, search.graph.num_tasks // params.tasks)
    sample = take_sample(search.graph, search.packed.task[:-1, COMPONENT], copies)
    graph, bound = sample.graph, lower_bound(sample.graph)
    if (
        2 * graph.num_tasks > search.graph.num_tasks
        or copies * bound.ns > params.most_filling * search.context.bound.ns
    ):
        return
    context = replace(search.context, meter=meter.rest(stretch.until).start(), bound=bound, on_progress=None)
    # The maximum over the members of a group may not fit, although each member fits.
    with suppress(InfeasibleError):
        alone = Search(graph, context)
        run(alone, WHOLE)
        meter.used += context.meter.used
        search.try_sequence(sample.sequence(alone.sequence))


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A graph with one component of each group, with mean durations and maximum bytes of the members of the group.

    ``member`` has the task that replaces a task of the sample in a copy, or `NO_TASK`; its shape is (number of tasks of
    the sample, number of copies). Every task of the whole graph occurs once.
    """

    graph: TaskGraph
    member: IntArray

    def sequence(self, of_sample: IntArray) -> IntArray:
        """Return all tasks, copy after copy, in the order of a sequence of the sample's tasks."""
        tasks = self.member[of_sample].T.ravel()
        found: IntArray = tasks[tasks != NO_TASK]
        return found


def take_sample(graph: TaskGraph, component_of_task: IntArray, copies: int) -> Sample:
    """Take one component out of about ``copies`` similar ones."""
    size = np.bincount(component_of_task)
    of_component, first = np.argsort(component_of_task, kind="stable"), np.cumsum(size) - size
    turn = np.empty(graph.num_tasks, np.int64)
    turn[of_component] = _turn_in_row(component_of_task[of_component])
    groups = _groups(_shapes(graph, component_of_task, turn), _profiles(graph, component_of_task), copies)
    group_of_component = np.full(len(size), NO_MEMBER, np.int64)
    group_of_component[[components[0] for components in groups]] = np.arange(len(groups))
    tasks = np.flatnonzero(group_of_component[component_of_task] != NO_MEMBER)
    components = _table(groups, copies)[group_of_component[component_of_task[tasks]]]
    missing = components == NO_MEMBER
    found = of_component[np.where(missing, 0, first[components] + turn[tasks, None])]
    member = np.where(missing, NO_TASK, found)
    return Sample(_mean_graph(graph, tasks, member), member)


def _mean_graph(graph: TaskGraph, tasks: IntArray, member: IntArray) -> TaskGraph:
    """Return the graph of some tasks, each with the mean duration and the maximum bytes of its members."""
    part, num_copies = part_of(graph, tasks), member.shape[1]
    # If a copy has no member, count the task of the sample once more.
    member = np.where(member == NO_TASK, tasks[:, None], member)
    activation, weight = part.activation_bytes.copy(), part.weight_gradient_bytes.copy()
    activation[part.pair] = graph.activation_bytes[graph.pair[member]].max(axis=1)
    weight[part.pair] = graph.weight_gradient_bytes[graph.pair[member]].max(axis=1)
    # Corresponding tasks have their edges in the same order.
    order, own = (np.argsort(each.edge_source, kind="stable") for each in (graph, part))
    first, source = np.searchsorted(graph.edge_source[order], member), part.edge_source[own]
    edges = order[first[source] + _turn_in_row(source)[:, None]]
    edge_bytes = part.edge_bytes.copy()
    edge_bytes[own] = graph.edge_bytes[edges].max(axis=1)
    return replace(
        part,
        duration_ns=graph.duration_ns[member].sum(axis=1) // num_copies,
        activation_bytes=activation,
        weight_gradient_bytes=weight,
        edge_bytes=edge_bytes,
    )


def _turn_in_row(row: IntArray) -> IntArray:
    """Return the position of each entry in its row, for sorted row numbers."""
    found: IntArray = np.arange(len(row)) - np.searchsorted(row, row)
    return found


def _shapes(graph: TaskGraph, component_of_task: IntArray, turn: IntArray) -> IntArray:
    """Return the number of the shape of each component. Components of one shape differ only in durations and bytes."""
    pair = graph.pair
    of_pair = (np.where(rows[pair] == NO_TASK, -1, turn[rows[pair]]) for rows in (graph.forward_of, graph.backward_of))
    idle = graph.duration_ns == 0
    tasks = _mixed(turn, graph.kind, graph.rank, graph.module, idle, *of_pair)
    order = np.argsort(graph.edge_source, kind="stable")
    source, target = graph.edge_source[order], graph.edge_target[order]
    shape = np.zeros(int(component_of_task.max()) + 1, np.uint64)
    np.add.at(shape, component_of_task, tasks)
    np.add.at(shape, component_of_task[source], _mixed(turn[source], turn[target], _turn_in_row(source)))
    found: IntArray = np.unique(shape, return_inverse=True)[1]
    return found


def _mixed(*columns: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Hash rows of numbers to one number each."""
    mixed = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        mixed += column.astype(np.int64).view(np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _profiles(graph: TaskGraph, component_of_task: IntArray) -> _Profiles:
    """Return for each component the time of its forwards, the time of its other tasks, and its bytes, by rank.

    Bytes are scaled so that their total equals the total time.
    """
    num_components, forward = int(component_of_task.max()) + 1, graph.kind == FORWARD
    activation = np.where(forward, graph.activation_bytes[graph.pair], 0).astype(np.float64)
    activation *= graph.duration_ns.sum() / max(1.0, activation.sum())
    column = component_of_task * graph.num_ranks + graph.rank
    return np.concatenate(
        [
            np.bincount(column, weights, num_components * graph.num_ranks).reshape(num_components, -1)
            for weights in (graph.duration_ns * forward, graph.duration_ns * ~forward, activation)
        ],
        axis=1,
    )


def _groups(shapes: IntArray, profiles: _Profiles, most: int) -> list[IntArray]:
    """Group components of one shape into groups of up to ``most`` similar ones, short ones first."""
    length, groups = profiles.sum(axis=1), []
    left = np.split(np.argsort(shapes, kind="stable"), np.cumsum(np.bincount(shapes))[:-1])
    while left:
        components = left.pop()
        if len(components) <= most:
            groups.append(components[np.argsort(length[components], kind="stable")])
            continue
        # Split along the column with the largest range, so that one half has a whole number of full groups.
        mine = profiles[components]
        components = components[np.argsort(mine[:, np.ptp(mine, axis=0).argmax()], kind="stable")]
        half = (len(components) // most + 1) // 2 * most
        left += [components[:half], components[half:]]
    return groups


def _table(groups: list[IntArray], copies: int) -> IntArray:
    """Return the member of each group in every copy, short ones first, so that the members of a copy are similar."""
    table = np.full((len(groups), copies), NO_MEMBER, np.int64)
    for number, components in enumerate(groups):
        # Spread the members of a group that is not full over the copies, starting at a different copy for each group.
        places = (np.arange(len(components)) * copies // len(components) + number) % copies
        table[number, np.sort(places)] = components
    return table


def part_of(graph: TaskGraph, tasks: IntArray) -> TaskGraph:
    """Return the graph of some tasks, with new numbers, of a graph without candidates.

    Tasks are in ascending order. No other task may be connected to them.
    """
    number = np.full(graph.num_tasks, NO_TASK, np.int64)
    number[tasks] = np.arange(len(tasks))
    pairs, pair = np.unique(graph.pair[tasks], return_inverse=True)
    edges = np.flatnonzero(number[graph.edge_source] != NO_TASK)
    source, target, delay = (
        number[graph.edge_source[edges]],
        number[graph.edge_target[edges]],
        graph.edge_delay_ns[edges],
    )

    def renumbered(of_pair: IntArray) -> IntArray:
        chosen = of_pair[pairs]
        return np.where(chosen == NO_TASK, NO_TASK, number[chosen])

    forward_of, backward_of = renumbered(graph.forward_of), renumbered(graph.backward_of)
    weight_of = renumbered(graph.weight_of)
    return replace(
        graph,
        kind=graph.kind[tasks],
        rank=graph.rank[tasks],
        duration_ns=graph.duration_ns[tasks],
        pair=pair,
        pass_id=np.unique(graph.pass_id[tasks], return_inverse=True)[1],
        microbatch=np.unique(graph.microbatch[tasks], return_inverse=True)[1],
        module=graph.module[tasks],
        activation_bytes=graph.activation_bytes[pairs],
        weight_gradient_bytes=graph.weight_gradient_bytes[pairs],
        edge_source=source,
        edge_target=target,
        edge_delay_ns=delay,
        edge_bytes=graph.edge_bytes[edges],
        labels=None,
        forward_of=forward_of,
        backward_of=backward_of,
        weight_of=weight_of,
        **adjacency((source, target, delay), (forward_of, backward_of, weight_of), len(tasks)),
    )
