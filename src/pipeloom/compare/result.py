"""An iteration under a baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeloom.errors import InfeasibleError
from pipeloom.packing import Packing
from pipeloom.report import Track, layers_by_rank, make_track
from pipeloom.search import uniform_settings
from pipeloom.spec import Layout
from pipeloom.taskgraph import NS_PER_S, TaskGraph
from pipeloom.timeline import LowerBound, Schedule, Timeline, lower_bound, simulate, within_limits


@dataclass(frozen=True)
class BaselineResult:
    """One system's iteration on one batch."""

    name: str
    layout: Layout
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    lower_bound: LowerBound
    """Of this system's own graph: its layout fixes what any schedule of it can reach."""
    after_s: float = 0.0
    """What this system alone needs after the pipeline: the gradients of replicated modules."""
    packing: Packing | None = None
    """The microbatches, of systems whose plans are made for executors."""

    @property
    def iteration_s(self) -> float:
        """The pipeline, and what this system alone needs after it."""
        return self.timeline.makespan_ns / NS_PER_S + self.after_s

    @property
    def fits(self) -> bool:
        """Whether it keeps to the limits of memory."""
        return within_limits(self.graph, self.schedule, self.timeline)


def track_of(result: BaselineResult, *, update_s: float = 0.0, num_tokens: int = 0) -> Track:
    """A system's iteration as reports show it: the whole of it, with what follows the pipeline and the layers by rank.

    Parameters
    ----------
    update_s : float
        What every system needs after the pipeline: reducing gradients, updating weights.
    num_tokens : int
        Tokens of the iteration, all replicas together; 0: not known.
    """
    layout = result.layout
    track = make_track(
        result.name, result.graph, result.schedule, result.timeline, result.lower_bound, layout.chunk_names
    )
    after_ns = round((result.after_s + update_s) * NS_PER_S)
    return replace(track, after_ns=after_ns, num_tokens=num_tokens, layers=layers_by_rank(layout))


def uniform_recomputation(name: str, layout: Layout, graph: TaskGraph, schedule: Schedule) -> BaselineResult:
    """Run an order under the fastest setting of recomputation that fits.

    Raises
    ------
    InfeasibleError
        None fits.
    """
    # Settings come fastest first, so the first that fits is the fastest of those that do.
    for setting in uniform_settings(graph):
        chosen = Schedule(schedule.order, np.full(graph.num_pairs, setting), name)
        timeline = simulate(graph, chosen)
        if within_limits(graph, chosen, timeline):
            return BaselineResult(name, layout, graph, chosen, timeline, lower_bound(graph))
    raise InfeasibleError(f"{name}: does not fit even with full recomputation")
