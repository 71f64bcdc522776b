"""Replay of a traced iteration: a task graph and an order for the simulator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeloom.explain.traces.messages import Message, link_medians, link_of
from pipeloom.explain.traces.traced import Iteration, TracedRun, Unit, input_of
from pipeloom.taskgraph import Edges, PairLabel, Pairs, TaskGraph, Tasks, make_graph
from pipeloom.timeline import Schedule, Timeline

Edge = tuple[Unit, Unit, int]
"""Source, target and delay in nanoseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplayGraph:
    """The graph of an iteration, its order, and its measured times relative to the first start.

    Attributes
    ----------
    graph : TaskGraph
        Durations are the times for which tasks occupy their rank: the computation, and the host's time around it.
    schedule : Schedule
        The traced order.
    messages : dict
        Message of every unit with an input from another rank.
    kept : Timeline
        Measured times for which tasks occupy their rank.
    computed : Timeline
        Measured times of the computations.
    """

    graph: TaskGraph
    schedule: Schedule
    messages: dict[Unit, Message]
    kept: Timeline
    computed: Timeline


def replayable(run: TracedRun, iteration: Iteration) -> ReplayGraph:
    """Make the graph that reproduces the iteration when simulated in the traced order.

    A task occupies its rank until the rank waits for something that the graph models: a message, or the receipt of its
    own message. Other time between two computations is host time and belongs to the next task. Messages take their
    measured time, or the median time if the receiver was late.
    """
    origin = iteration.start_ns
    compute = {one.unit: (one.start_ns - origin, one.end_ns - origin) for rank in iteration.ranks for one in rank}
    held = _held(run, iteration)
    begin, free = _kept(run, iteration, held)
    units = sorted(compute)
    messages = _messages(run, iteration, begin, free)
    medians = link_medians(run, [messages])
    delays = {
        unit: one.since_made_ns if one.was_waited_for else min(one.since_made_ns, medians[link_of(run, unit)])
        for unit, one in messages.items()
    }
    graph = chain_graph(
        run,
        f"iteration {iteration.number}",
        {unit: free[unit] - begin[unit] for unit in units},
        delays,
        extra=[(source, unit, begin[unit] - free[source]) for unit, source in held.items()],
    )
    number = {unit: i for i, unit in enumerate(units)}
    order = tuple(np.array([number[one.unit] for one in rank], np.int64) for rank in iteration.ranks)
    kept = Timeline(*(np.array([times[unit] for unit in units], np.int64) for times in (begin, free)))
    computed = Timeline(*(np.array([compute[unit][i] for unit in units], np.int64) for i in (0, 1)))
    return ReplayGraph(graph, Schedule(order, method="as traced"), messages, kept, computed)


def chain_graph(
    run: TracedRun,
    name: str,
    duration_ns: Mapping[Unit, int],
    delay_ns: Mapping[Unit, int],
    *,
    extra: Sequence[Edge] = (),
    capacity: Sequence[int] | None = None,
) -> TaskGraph:
    """Build the graph of an iteration over a chain of stages; task i is the i-th unit in sorted order.

    ``delay_ns`` is the transfer time of a unit's input. ``capacity`` limits the number of activations on each rank,
    where every pair counts 1.
    """
    units = sorted(duration_ns)
    number = {unit: i for i, unit in enumerate(units)}
    turn = {
        stage: sum(run.stage_rank[s] == run.stage_rank[stage] for s in range(stage)) for stage in range(run.num_stages)
    }
    segments = {key: i for i, key in enumerate(sorted({(u.kind, turn[u.stage], u.microbatch) for u in units}))}
    pairs = {key: i for i, key in enumerate(sorted({(u.stage, u.microbatch) for u in units}))}
    edges: list[Edge] = list(extra)
    for unit in units:
        source = input_of(unit, number, run.num_stages)
        if source is not None:
            edges.append((source, unit, delay_ns.get(unit, 0)))
    return make_graph(
        name=name,
        num_ranks=run.num_ranks,
        tasks=Tasks(
            kind=[unit.kind for unit in units],
            rank=[run.stage_rank[unit.stage] for unit in units],
            duration_ns=[duration_ns[unit] for unit in units],
            pair=[pairs[unit.stage, unit.microbatch] for unit in units],
            pass_id=[segments[unit.kind, turn[unit.stage], unit.microbatch] for unit in units],
            microbatch=[unit.microbatch for unit in units],
            module=[0] * len(units),
            module_names=("model",),
        ),
        pairs=Pairs(
            activation_bytes=[0 if capacity is None else 1] * len(pairs),
            labels=tuple(PairLabel(stage, microbatch, 0) for stage, microbatch in pairs),
        ),
        edges=Edges(
            source=[number[source] for source, _, _ in edges],
            target=[number[target] for _, target, _ in edges],
            delay_ns=[delay for _, _, delay in edges],
        ),
        capacity_bytes=capacity,
    )


def _kept(run: TracedRun, iteration: Iteration, held: Mapping[Unit, Unit]) -> tuple[dict[Unit, int], dict[Unit, int]]:
    """Return the start and the end of the time for which each task occupies its rank, from the first start."""
    ends = {one.unit: one.end_ns for rank in iteration.ranks for one in rank}
    waited: dict[Unit, int] = {}
    """End of a wait that the graph models."""
    latest: dict[Unit, int] = {}
    """Latest end of a task's occupation, since its consumer began then."""
    for rank in iteration.ranks:
        for before, one in zip((None, *rank), rank, strict=False):
            source = input_of(one.unit, ends, run.num_stages)
            moments = [] if one.arrived_ns is None else [one.arrived_ns]
            if one.unit in held:
                moments.append(one.received_ns)
                latest[held[one.unit]] = min(one.received_ns, latest.get(held[one.unit], one.received_ns))
            if source is not None and (before is None or ends[source] > before.end_ns):
                moments.append(ends[source])
            if moments or before is None:
                # Clocks of ranks agree only roughly: an input may seem to be made after it was used.
                waited[one.unit] = min(one.start_ns, max(moments, default=one.start_ns))
            if source is not None:
                until = waited[one.unit] if one.unit in waited or before is None else before.end_ns
                latest[source] = min(until, latest.get(source, until))
    begin: dict[Unit, int] = {}
    free: dict[Unit, int] = {}
    for rank in iteration.ranks:
        for one, after in zip(rank, (*rank[1:], None), strict=True):
            until = one.end_ns if after is None else after.entered_ns
            free[one.unit] = max(one.end_ns, min(until, latest.get(one.unit, until)))
        last: Unit | None = None
        for one in rank:
            begin[one.unit] = waited[one.unit] if last is None or one.unit in waited else free[last]
            last = one.unit
    origin = iteration.start_ns
    return ({unit: t - origin for unit, t in begin.items()}, {unit: t - origin for unit, t in free.items()})


def _messages(
    run: TracedRun, iteration: Iteration, begin: Mapping[Unit, int], free: Mapping[Unit, int]
) -> dict[Unit, Message]:
    """Return the times of all messages between ranks."""
    found = {}
    origin = iteration.start_ns
    for target, rank in enumerate(iteration.ranks):
        for one in rank:
            source = input_of(one.unit, begin, run.num_stages)
            if source is None or run.stage_rank[source.stage] == target:
                continue
            posted = iteration.posted[target].get(one.unit)
            sendable = free[source] if posted is None else max(free[source], posted.at_ns - origin)
            was_waited_for = one.arrived_ns is not None
            there = begin[one.unit] if was_waited_for else max(begin[one.unit], one.received_ns - origin)
            since_made = max(0, begin[one.unit] - free[source])
            found[one.unit] = Message(max(0, there - sendable), was_waited_for, since_made)
    return found


def _held(run: TracedRun, iteration: Iteration) -> dict[Unit, Unit]:
    """Return, by unit before which a rank waited for the receipt of its message, the unit that delayed the receiver."""
    found: dict[Unit, Unit] = {}
    ends = [[one.end_ns for one in rank] for rank in iteration.ranks]
    known = {one.unit for rank in iteration.ranks for one in rank}
    takers = {input_of(unit, known, run.num_stages): unit for unit in known}
    for rank in iteration.ranks:
        for one in rank:
            taker = None if one.held_by is None else takers.get(one.held_by)
            if taker is None:
                continue
            receiver = run.stage_rank[taker.stage]
            posted = iteration.posted[receiver].get(taker)
            at = -1 if posted is None else bisect_right(ends[receiver], posted.at_ns) - 1
            if at >= 0 and ends[receiver][at] <= one.received_ns:
                found[one.unit] = iteration.ranks[receiver][at].unit
    return found
