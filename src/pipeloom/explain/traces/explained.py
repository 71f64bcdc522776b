"""A traced run explained: replayed, its bubbles by cause, its costs, and what the best order would take with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pipeloom.cost.layers import LayerTable
from pipeloom.explain.traces.costs import delay_medians, layer_table, task_means
from pipeloom.explain.traces.idle import idle_by_cause
from pipeloom.explain.traces.replay import ReplayGraph, chain_graph, replayable
from pipeloom.explain.traces.traced import TracedRun, Unit
from pipeloom.report import Track, make_track
from pipeloom.search import Share, Solution, StoppingRule, solve
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import LowerBound, Schedule, Timeline, simulate


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """One iteration as it was measured and as the simulator runs it again.

    Attributes
    ----------
    number : int
    made : Replayable
    replayed : Timeline
    compute_ns : array, shape (num_ranks,)
        What each rank computed.
    measured_ns, replayed_ns : int
    measured_idle_ns, replayed_idle_ns : array, shape (num_ranks, len(CAUSES))
        By cause; a row adds up to the iteration less what the rank computed.
    """

    number: int
    made: ReplayGraph
    replayed: Timeline
    compute_ns: IntArray
    measured_ns: int
    replayed_ns: int
    measured_idle_ns: IntArray
    replayed_idle_ns: IntArray

    @property
    def error(self) -> float:
        """Replayed over measured, less one."""
        return self.replayed_ns / self.measured_ns - 1

    @property
    def bubble_errors(self) -> tuple[float, ...]:
        """The same of every rank's idle time."""
        pairs = zip(self.replayed_idle_ns.sum(axis=1), self.measured_idle_ns.sum(axis=1), strict=True)
        return tuple(float(again / measured) - 1 if measured else 0.0 for again, measured in pairs)


@dataclass(frozen=True, slots=True, eq=False)
class WhatIf:
    """The traced order and better ones on mean costs.

    Attributes
    ----------
    graph : TaskGraph
        Every task takes the mean of its kind, stage and size, host included; every message the median of its link.
    as_traced : Schedule
    as_traced_timeline : Timeline
    in_flight : array, shape (num_ranks,)
        Most microbatches times stages whose activations a rank held at once.
    best : Solution
        The best order found that holds no more than that.
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
    """All of it."""

    run: TracedRun
    replays: tuple[Replay, ...]
    what_if: WhatIf
    layers: LayerTable

    @property
    def mean_measured_ns(self) -> int:
        """Mean of the iterations as measured."""
        return round(float(np.mean([one.measured_ns for one in self.replays])))

    @property
    def typical(self) -> Replay:
        """The iteration of median time."""
        ordered = sorted(self.replays, key=lambda one: one.measured_ns)
        return ordered[(len(ordered) - 1) // 2]


def explain_run(
    run: TracedRun,
    name: str,
    *,
    budget: StoppingRule,
    seed: int,
    shares: dict[int, tuple[tuple[str, float, float], ...]],
) -> Explanation:
    """Explain a traced run.

    Parameters
    ----------
    budget : StoppingRule
        Of the search for better orders: half of it within the memory of the trace, half without a limit.
    shares : dict
        Layers of stages, from `layer_shares`; empty: every stage is one layer.
    """
    made = [replayable(run, iteration) for iteration in run.iterations]
    replays = tuple(_replay(iteration.number, each) for iteration, each in zip(run.iterations, made, strict=True))
    delays = delay_medians(run, made)
    across = list(delays.values())
    table = layer_table(run, name, float(np.mean(across)) if across else 0.0, shares)
    typical = sorted(zip(replays, made, strict=True), key=lambda pair: pair[0].measured_ns)[(len(made) - 1) // 2][1]
    what = what_if(run, name, task_means(run, made), delays, typical.schedule, budget=budget, seed=seed)
    return Explanation(run, replays, what, table)


def what_if(
    run: TracedRun,
    name: str,
    duration_ns: Mapping[Unit, int],
    delay_ns: Mapping[Unit, int],
    order: Schedule,
    *,
    budget: StoppingRule,
    seed: int,
) -> WhatIf:
    """Search better orders of a chain of stages than one that is known, within its memory and without a limit."""
    graph = chain_graph(run, name, duration_ns, delay_ns)
    plain = simulate(graph, order)
    counted = chain_graph(run, name, duration_ns, delay_ns, capacity=[graph.num_pairs] * run.num_ranks)
    in_flight = simulate(counted, order).peak_bytes
    half = Share(budget, 0.5)
    best = _or_known(solve(replace(counted, capacity_bytes=in_flight), budget=half, seed=seed), order, plain)
    unlimited = _or_known(solve(graph, budget=half, seed=seed), best.schedule, best.timeline)
    return WhatIf(graph, order, plain, in_flight, best, unlimited)


def _or_known(found: Solution, known: Schedule, timeline: Timeline) -> Solution:
    """What was found, or what was known before where that is faster."""
    if found.timeline.makespan_ns <= timeline.makespan_ns:
        return found
    return replace(found, schedule=known, timeline=timeline, method=known.method)


def _replay(number: int, made: ReplayGraph) -> Replay:
    again = simulate(made.graph, made.schedule)
    compute = made.computed.end_ns - made.computed.start_ns
    measured_idle, replayed_idle = idle_by_cause(made, made.kept), idle_by_cause(made, again)
    per_rank = np.bincount(made.graph.rank, weights=compute, minlength=made.graph.num_ranks).astype(np.int64)
    return Replay(
        number=number,
        made=made,
        replayed=again,
        compute_ns=per_rank,
        measured_ns=int(per_rank[0] + measured_idle[0].sum()),
        replayed_ns=int(per_rank[0] + replayed_idle[0].sum()),
        measured_idle_ns=measured_idle,
        replayed_idle_ns=replayed_idle,
    )


def tracks(found: Explanation) -> list[Track]:
    """The typical iteration as measured and as replayed, then `what_if_tracks`, ready to be drawn."""
    chunks, one = _chunk_names(found.run.num_stages), found.typical
    measured = replace(one.made.computed, peak_bytes=np.zeros(found.run.num_ranks, np.int64))
    return [
        make_track(f"{word}, iteration {one.number}", one.made.graph, one.made.schedule, timeline, None, chunks)
        for word, timeline in (("measured", measured), ("replayed", one.replayed))
    ] + what_if_tracks(found.what_if, found.run.num_stages)


def what_if_tracks(what: WhatIf, num_stages: int) -> list[Track]:
    """The traced order and the best ones on mean costs."""
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
