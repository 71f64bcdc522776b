"""Track: one iteration on all ranks, planned or measured, ready to be shown."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipeloom.spec import Layout
from pipeloom.taskgraph import KIND_NAMES, NS_PER_S, TaskGraph
from pipeloom.timeline import LowerBound, Schedule, Timeline, bubbles, gap


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """One iteration on all ranks.

    Attributes
    ----------
    title : str
        What is shown, e.g. ``planned`` or ``1F1B``.
    graph : TaskGraph
        With the chosen candidates written in; `make_track` does it.
    timeline : Timeline
        Planned or measured.
    lower_bound : LowerBound or None
    chunk_names : tuple of str
        Name of each chunk number in the graph's labels; empty: tasks are named by their module.
    strategies : tuple of str
        Memory strategy of each pair; empty: none is known.
    after_ns : int
        What the iteration needs after the pipeline: reducing gradients, updating weights.
    num_tokens : int
        Tokens of the iteration, all replicas together; 0: not known.
    layers : tuple of str
        Of each rank, the layers that lie on it; empty: not known.
    """

    title: str
    graph: TaskGraph
    timeline: Timeline
    lower_bound: LowerBound | None = None
    chunk_names: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    after_ns: int = 0
    num_tokens: int = 0
    layers: tuple[str, ...] = ()


class Box(NamedTuple):
    """One task as reports draw it."""

    task: int
    kind: str
    rank: int
    module: str
    chunk: str
    microbatch: int
    sub_microbatch: int | None
    """None where the microbatch goes through the module whole."""
    start_ns: int
    end_ns: int
    strategy: str
    activation_bytes: int

    @property
    def unit(self) -> str:
        """Microbatch and, where it is split, sub-microbatch: ``3`` or ``3.1``."""
        return f"{self.microbatch}" if self.sub_microbatch is None else f"{self.microbatch}.{self.sub_microbatch}"

    @property
    def name(self) -> str:
        """The task in short: ``F vision.0 3.1``."""
        return f"{self.kind} {self.chunk} {self.unit}"


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of a track."""

    makespan_ns: int
    """Of the pipeline."""
    iteration_ns: int
    """The pipeline and what comes after it."""
    bubble_share: float
    """Idle part of all ranks' time, 0 to 1."""
    peak_bytes: int
    """Of the fullest rank, static bytes included."""
    lower_bound_ns: int | None
    lower_bound_name: str
    tokens_per_s: float | None = None

    @property
    def gap(self) -> float | None:
        """Makespan above the lower bound, as a share of the bound; None where there is no bound."""
        return None if not self.lower_bound_ns else gap(self.makespan_ns, self.lower_bound_ns)


def make_track(
    title: str,
    graph: TaskGraph,
    schedule: Schedule | None,
    timeline: Timeline,
    lower_bound: LowerBound | None = None,
    chunk_names: tuple[str, ...] = (),
) -> Track:
    """Prepare a schedule and its timeline for showing: write the chosen candidates into the graph."""
    if schedule is None or schedule.candidate is None or graph.candidates is None:
        return Track(title, graph, timeline, lower_bound, chunk_names)
    chosen = np.asarray(schedule.candidate).tolist()
    strategies = tuple(options[index].strategy for options, index in zip(graph.candidates, chosen, strict=True))
    graph = graph.with_candidates(schedule.candidate)
    return Track(title, graph, timeline, lower_bound, chunk_names, strategies)


def key_figures(track: Track) -> Figures:
    """Makespan, bubbles, peak memory and distance from the bound of one track."""
    peaks, bound = track.timeline.peak_bytes, track.lower_bound
    iteration_ns = track.timeline.makespan_ns + track.after_ns
    return Figures(
        makespan_ns=track.timeline.makespan_ns,
        iteration_ns=iteration_ns,
        bubble_share=bubbles(track.graph, track.timeline).share,
        peak_bytes=int(peaks.max()) if len(peaks) else 0,
        lower_bound_ns=None if bound is None else bound.ns,
        lower_bound_name="" if bound is None else bound.name,
        tokens_per_s=track.num_tokens / (iteration_ns / NS_PER_S) if track.num_tokens and iteration_ns else None,
    )


def layers_by_rank(layout: Layout) -> tuple[str, ...]:
    """Of each rank the layers that lie on it, first and last of each chunk: ``vision 0-15, lm 0-3, lm 16-19``."""
    return tuple(
        ", ".join(
            f"{chunk.module} {chunk.layers[0]}-{chunk.layers[1]}" for chunk in layout.chunks if chunk.rank == rank
        )
        for rank in range(layout.num_ranks)
    )


def boxes(track: Track) -> list[Box]:
    """All tasks of a track in order of their start."""
    graph, labels = track.graph, track.graph.labels
    split = _split_units(graph)
    start, end = track.timeline.start_ns.tolist(), track.timeline.end_ns.tolist()
    made = []
    for task in np.lexsort((np.arange(graph.num_tasks), track.timeline.start_ns)).tolist():
        pair, module = int(graph.pair[task]), graph.module_names[graph.module[task]]
        microbatch, sub, chunk = int(graph.microbatch[task]), None, module
        if labels is not None:
            label = labels[pair]
            if (module, microbatch) in split:
                sub = label.sub_microbatch
            if label.chunk < len(track.chunk_names):
                chunk = track.chunk_names[label.chunk]
        made.append(
            Box(
                task,
                KIND_NAMES[graph.kind[task]],
                int(graph.rank[task]),
                module,
                chunk,
                microbatch,
                sub,
                start[task],
                end[task],
                track.strategies[pair] if track.strategies else "",
                int(graph.activation_bytes[pair]),
            )
        )
    return made


def _split_units(graph: TaskGraph) -> set[tuple[str, int]]:
    """Modules and microbatches of which there is more than one sub-microbatch."""
    subs: dict[tuple[str, int], set[int]] = defaultdict(set)
    for pair, label in enumerate(graph.labels or ()):
        task = int(graph.forward_of[pair])
        subs[graph.module_names[graph.module[task]], int(graph.microbatch[task])].add(label.sub_microbatch)
    return {unit for unit, parts in subs.items() if len(parts) > 1}
