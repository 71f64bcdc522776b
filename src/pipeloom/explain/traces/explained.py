"""Explanation of a traced run: a replay, bubbles by cause, costs, and the time of the best order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeloom.cost.layers import LayerTable
from pipeloom.explain.traces.costs import delay_medians, layer_table, task_means
from pipeloom.explain.traces.idle import idle_by_cause
from pipeloom.explain.traces.replay import ReplayGraph, chain_graph, replayable
from pipeloom.explain.traces.traced import TracedRun, Unit
from pipeloom.report import Track, make_track
from pipeloom.search import Budget, Solution, solve
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import LowerBound, Schedule, Timeline, simulate


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """One iteration, measured and replayed by the simulator.

    Attributes
    ----------
    compute_ns : array, shape (num_ranks,)
        Compute time of each rank.
    measured_idle_ns, replayed_idle_ns : array, shape (num_ranks, len(CAUSES))
        Idle time by cause. A row adds up to the iteration less the rank's compute time.
    """

    number: int
    replay_graph: ReplayGraph
    replayed: Timeline
    compute_ns: IntArray
    measured_ns: int
    replayed_ns: int
    measured_idle_ns: IntArray
    replayed_idle_ns: IntArray

    @property
    def error(self) -> float:
        """Replayed time divided by measured time, minus one."""
        return self.replayed_ns / self.measured_ns - 1

    @property
    def bubble_errors(self) -> tuple[float, ...]:
        """The same for the idle time of every rank."""
        pairs = zip(self.replayed_idle_ns.sum(axis=1), self.measured_idle_ns.sum(axis=1), strict=True)
        return tuple(float(again / measured) - 1 if measured else 0.0 for again, measured in pairs)


@dataclass(frozen=True, slots=True, eq=False)
class WhatIf:
    """The traced order and better orders, with mean costs.

    Attributes
    ----------
    graph : TaskGraph
        Graph with mean durations by kind, stage and shape, host time included, and median message times by link.
    in_flight : array, shape (num_ranks,)
        Largest number of activations (microbatches times stages) on a rank at once.
    best : Solution
        The best order found with at most ``in_flight`` activations.
    unlimited : Solution
        The best order found without a limit.
    """

    graph: TaskGraph
    as_traced: Schedule
    as_traced_timeline: Timeline
    in_flight: IntArray
    best: Solution
    unlimited: Solution


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """Explanation of a traced run."""

    run: TracedRun
    replays: tuple[Replay, ...]
    what_if: WhatIf
    layers: LayerTable

    @property
    def mean_measured_ns(self) -> int:
        """Mean measured time of the iterations."""
        return round(float(np.mean([one.measured_ns for one in self.replays])))

    @property
    def typical(self) -> Replay:
        """The iteration with the median time."""
        return _median_of(self.replays)


def explain_run(
    run: TracedRun, name: str, *, budget: Budget, seed: int, shares: dict[int, tuple[tuple[str, float, float], ...]]
) -> Explanation:
    """Explain a traced run.

    Half of the ``budget`` is for better orders within the memory of the trace, half for those without a limit.
    ``shares`` has the layers by stage, from `layer_shares`; other stages are one layer.
    """
    replay_graphs = [replayable(run, iteration) for iteration in run.iterations]
    replays = tuple(
        _replay(iteration.number, each) for iteration, each in zip(run.iterations, replay_graphs, strict=True)
    )
    delays = delay_medians(run, replay_graphs)
    across = list(delays.values())
    table = layer_table(run, name, float(np.mean(across)) if across else 0.0, shares)
    typical = _median_of(replays).replay_graph
    what = what_if(run, name, task_means(run, replay_graphs), delays, typical.schedule, budget=budget, seed=seed)
    return Explanation(run, replays, what, table)


def what_if(
    run: TracedRun,
    name: str,
    duration_ns: Mapping[Unit, int],
    delay_ns: Mapping[Unit, int],
    order: Schedule,
    *,
    budget: Budget,
    seed: int,
) -> WhatIf:
    """Search for better orders of a chain of stages than ``order``, within its memory and without a limit."""
    graph = chain_graph(run, name, duration_ns, delay_ns)
    plain = simulate(graph, order)
    counted = chain_graph(run, name, duration_ns, delay_ns, capacity=[graph.num_pairs] * run.num_ranks)
    in_flight = simulate(counted, order).peak_bytes
    half = budget.part(0.5)
    best = _or_known(solve(replace(counted, capacity_bytes=in_flight), budget=half, seed=seed), order, plain)
    unlimited = _or_known(solve(graph, budget=half, seed=seed), best.schedule, best.timeline)
    return WhatIf(graph, order, plain, in_flight, best, unlimited)


def _or_known(found: Solution, known: Schedule, timeline: Timeline) -> Solution:
    """Return the solution found, or the known schedule if it is faster."""
    if found.timeline.makespan_ns <= timeline.makespan_ns:
        return found
    return replace(found, schedule=known, timeline=timeline, method=known.method)


def _median_of(replays: Sequence[Replay]) -> Replay:
    return sorted(replays, key=lambda one: one.measured_ns)[(len(replays) - 1) // 2]


def _replay(number: int, replay_graph: ReplayGraph) -> Replay:
    again = simulate(replay_graph.graph, replay_graph.schedule)
    compute = replay_graph.computed.end_ns - replay_graph.computed.start_ns
    measured_idle, replayed_idle = idle_by_cause(replay_graph, replay_graph.kept), idle_by_cause(replay_graph, again)
    per_rank = np.bincount(replay_graph.graph.rank, weights=compute, minlength=replay_graph.graph.num_ranks).astype(
        np.int64
    )
    return Replay(
        number=number,
        replay_graph=replay_graph,
        replayed=again,
        compute_ns=per_rank,
        measured_ns=int(per_rank[0] + measured_idle[0].sum()),
        replayed_ns=int(per_rank[0] + replayed_idle[0].sum()),
        measured_idle_ns=measured_idle,
        replayed_idle_ns=replayed_idle,
    )


def tracks(found: Explanation) -> list[Track]:
    """Return the tracks of the typical iteration, measured and replayed, and `what_if_tracks`."""
    chunks, one = _chunk_names(found.run.num_stages), found.typical
    measured = replace(one.replay_graph.computed, peak_bytes=np.zeros(found.run.num_ranks, np.int64))
    return [
        make_track(
            f"{word}, iteration {one.number}", one.replay_graph.graph, one.replay_graph.schedule, timeline, None, chunks
        )
        for word, timeline in (("measured", measured), ("replayed", one.replayed))
    ] + what_if_tracks(found.what_if, found.run.num_stages)


def what_if_tracks(what: WhatIf, num_stages: int) -> list[Track]:
    """Return the tracks of the traced order and the best orders, with mean costs."""
    rows: list[tuple[str, Schedule, Timeline, LowerBound | None]] = [
        ("this order, mean costs", what.as_traced, what.as_traced_timeline, None)
    ]
    rows += [
        (f"best order, {words}", found.schedule, found.timeline, found.lower_bound)
        for words, found in (("as many activations", what.best), ("no limit", what.unlimited))
    ]
    return [
        make_track(title, what.graph, order, line, bound, _chunk_names(num_stages))
        for title, order, line, bound in rows
    ]


def _chunk_names(num_stages: int) -> tuple[str, ...]:
    return tuple(f"stage.{stage}" for stage in range(num_stages))
