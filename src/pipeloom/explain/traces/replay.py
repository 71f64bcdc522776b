"""A traced iteration as a graph and an order that the simulator runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipeloom.explain.traces.dependencies import input_of, output_of
from pipeloom.explain.traces.messages import Message, link_medians, link_of
from pipeloom.explain.traces.traced import Iteration, TracedRun, Unit
from pipeloom.taskgraph import Edges, PairLabel, Pairs, TaskGraph, Tasks, make_graph
from pipeloom.timeline import Schedule, Timeline

Edge = tuple[Unit, Unit, int]
"""Source, target, and nanoseconds between them."""


@dataclass(frozen=True, slots=True, eq=False)
class Replayable:
    """A graph of an iteration, the order in which it ran, and the times that were measured, from its first start.

    Attributes
    ----------
    graph : TaskGraph
        A task lasts as long as it keeps its rank: the computation, and the host's time before and after it.
    schedule : Schedule
    messages : dict
        Of every unit with an input from another rank.
    kept : Timeline
        Measured: when each task had its rank.
    computed : Timeline
        Measured: the computations in it.
    """

    graph: TaskGraph
    schedule: Schedule
    messages: dict[Unit, Message]
    kept: Timeline
    computed: Timeline


def replayable(run: TracedRun, iteration: Iteration) -> Replayable:
    """Make the graph that, run in the order of the trace, is the iteration again.

    A task keeps its rank from the moment its input was there until the rank waits for a message again, but no longer
    than until what it feeds began. What comes between two tasks are messages as long as they were measured, of the
    median time where a receiver came later, and where a rank waited for its own message to be taken, what its receiver
    did before it posted its receive.
    """
    origin = iteration.start_ns
    begin: dict[Unit, int] = {}
    free: dict[Unit, int] = {}
    compute: dict[Unit, tuple[int, int]] = {}
    for rank in iteration.ranks:
        for one in rank:
            compute[one.unit] = (one.start_ns - origin, one.end_ns - origin)
            begin[one.unit] = one.received_ns - origin
        if rank[0].arrived_ns is None:
            begin[rank[0].unit] = compute[rank[0].unit][0]
    for rank in iteration.ranks:
        for one, after in pairwise(rank):
            taker = output_of(one.unit, begin, run.num_stages)
            until = after.entered_ns - origin if taker is None else min(after.entered_ns - origin, begin[taker])
            free[one.unit] = max(compute[one.unit][1], until)
        free[rank[-1].unit] = compute[rank[-1].unit][1]
    units = sorted(compute)
    messages = _messages(run, iteration, begin, free)
    usual = link_medians(run, [messages])
    delays = {
        unit: one.since_made_ns if one.was_waited_for else min(one.since_made_ns, usual[link_of(run, unit)])
        for unit, one in messages.items()
    }
    graph = chain_graph(
        run,
        f"iteration {iteration.number}",
        {unit: free[unit] - begin[unit] for unit in units},
        delays,
        extra=_held_edges(run, iteration, begin, free),
    )
    number = {unit: i for i, unit in enumerate(units)}
    order = tuple(np.array([number[one.unit] for one in rank], np.int64) for rank in iteration.ranks)
    kept = Timeline(*(np.array([times[unit] for unit in units], np.int64) for times in (begin, free)))
    computed = Timeline(*(np.array([compute[unit][i] for unit in units], np.int64) for i in (0, 1)))
    return Replayable(graph, Schedule(order, method="as traced"), messages, kept, computed)


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

    ``delay_ns`` says how long the input of a unit is under way. ``capacity`` limits how many activations each rank
    holds: every pair counts 1.
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
            segment=[segments[unit.kind, turn[unit.stage], unit.microbatch] for unit in units],
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


def _messages(
    run: TracedRun, iteration: Iteration, begin: Mapping[Unit, int], free: Mapping[Unit, int]
) -> dict[Unit, Message]:
    """Times of all messages between ranks."""
    found = {}
    for target, rank in enumerate(iteration.ranks):
        for one in rank:
            source = input_of(one.unit, begin, run.num_stages)
            if source is not None and run.stage_rank[source.stage] != target:
                posted = iteration.posted[target].get(one.unit)
                could_go = free[source] if posted is None else max(free[source], posted.at_ns - iteration.start_ns)
                found[one.unit] = Message(
                    max(0, begin[one.unit] - could_go),
                    one.arrived_ns is not None,
                    max(0, begin[one.unit] - free[source]),
                )
    return found


def _held_edges(
    run: TracedRun, iteration: Iteration, begin: Mapping[Unit, int], free: Mapping[Unit, int]
) -> list[Edge]:
    """What a rank waited for that waited until an own message was taken: what its receiver did before it posted."""
    edges: list[Edge] = []
    ends = [[one.end_ns for one in rank] for rank in iteration.ranks]
    for rank in iteration.ranks:
        for one in rank:
            taker = None if one.held_by is None else output_of(one.held_by, begin, run.num_stages)
            if taker is None:
                continue
            receiver = run.stage_rank[taker.stage]
            posted = iteration.posted[receiver].get(taker)
            at = -1 if posted is None else bisect_right(ends[receiver], posted.at_ns) - 1
            if at >= 0:
                source = iteration.ranks[receiver][at].unit
                if free[source] <= begin[one.unit]:
                    edges.append((source, one.unit, begin[one.unit] - free[source]))
    return edges
