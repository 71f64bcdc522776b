"""Result of one iteration under a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeloom.errors import InfeasibleError
from pipeloom.packing import Packing
from pipeloom.report import Track, layers_by_rank, make_track
from pipeloom.search import uniform_settings
from pipeloom.spec import Layout
from pipeloom.taskgraph import NS_PER_S, IntArray, TaskGraph
from pipeloom.timeline import LowerBound, Schedule, Timeline, lower_bound, simulate, within_limits
from pipeloom.units import to_four_digits


@dataclass(frozen=True)
class BaselineResult:
    """One iteration under one system."""

    name: str
    layout: Layout
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    proven: LowerBound | None = None
    """Lower bound that the search of this schedule has proved; None: computed when it is read."""
    after_s: float = 0.0
    """Time after the pipeline that only this system needs, for gradients of replicated modules."""
    packing: Packing | None = None
    """Packing, for systems whose plans can be executed."""
    update_ns: IntArray | None = None
    """Time to reduce gradients and update weights on each rank of the graph; None: that of the layout's chunks."""
    over_limit: bool = False
    """Whether it exceeds the memory and was timed without a limit."""

    @cached_property
    def lower_bound(self) -> LowerBound:
        """Lower bound of this system's graph, under its layout."""
        return self.proven or lower_bound(self.graph)

    @property
    def iteration_s(self) -> float:
        """Time of the pipeline plus ``after_s``, without the update of the weights."""
        return self.timeline.makespan_ns / NS_PER_S + self.after_s

    @property
    def work_ns(self) -> int:
        """Sum of the durations of all tasks, with what they recompute."""
        return int((self.timeline.end_ns - self.timeline.start_ns).sum())

    @property
    def fits(self) -> bool:
        """Whether it fits into memory."""
        return not self.over_limit and within_limits(self.graph, self.schedule, self.timeline)


def track_of(result: BaselineResult, *, update_s: float = 0.0, num_tokens: int = 0) -> Track:
    """Make the track of an iteration for reports, with the time after the pipeline and the layers by rank.

    ``update_s`` is the time after the pipeline and ``after_s``: gradient reduction and weight update. ``num_tokens``
    are the tokens of the iteration on all replicas; 0: unknown.
    """
    layout = result.layout
    track = make_track(
        result.name, result.graph, result.schedule, result.timeline, result.lower_bound, layout.chunk_names
    )
    after_ns = round((result.after_s + update_s) * NS_PER_S)
    return replace(track, after_ns=after_ns, num_tokens=num_tokens, layers=layers_by_rank(layout))


def fastest(name: str, found: Sequence[BaselineResult]) -> BaselineResult:
    """Return the fastest result; raise `InfeasibleError` if there is none, since no setting fits.

    Of results that are equally fast to four digits, return the one with the least work: it recomputes least.
    """
    if not found:
        raise InfeasibleError(f"{name}: does not fit even with full recomputation")
    return min(found, key=lambda one: (to_four_digits(one.iteration_s), one.work_ns, one.iteration_s))


def uniform_recomputation(name: str, layout: Layout, graph: TaskGraph, schedule: Schedule) -> BaselineResult:
    """Simulate an order under the fastest recomputation setting that fits; raise `InfeasibleError` if none fits."""
    return first_setting(name, layout, graph, [schedule], uniform_settings(graph))


def first_setting(
    name: str, layout: Layout, graph: TaskGraph, orders: Sequence[Schedule], settings: Sequence[int]
) -> BaselineResult:
    """Return the fastest order under the first setting with which one fits; raise `InfeasibleError` if none fits."""
    for setting in settings:
        choice = np.full(graph.num_pairs, setting)
        tried = [timed(name, layout, graph, order, choice) for order in orders]
        if fitting := [one for one in tried if one.fits]:
            return fastest(name, fitting)
    return fastest(name, [])


def timed(name: str, layout: Layout, graph: TaskGraph, order: Schedule, choice: IntArray) -> BaselineResult:
    """Simulate an order with these candidates."""
    chosen = Schedule(order.order, choice, name)
    return BaselineResult(name, layout, graph, chosen, simulate(graph, chosen))
