"""Track: one iteration on all ranks, planned or measured, for reports."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipeloom.spec import Layout
from pipeloom.taskgraph import KIND_NAMES, NS_PER_S, TaskGraph
from pipeloom.timeline import LowerBound, Schedule, Timeline, bubbles, gap

KIND_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """One iteration on all ranks.

    Attributes
    ----------
    title : str
        Title, such as ``planned`` or ``1F1B``.
    graph : TaskGraph
        Graph with the chosen candidates; see `make_track`.
    timeline : Timeline
        Planned or measured times.
    lower_bound : LowerBound or None
        Lower bound of the graph, if known.
    chunk_names : tuple of str
        Names of the chunks in the graph's labels; if empty, tasks are named by their module.
    strategies : tuple of str
        Memory strategy of each pair; empty if unknown.
    after_ns : int
        Time after the pipeline: gradient reduction and weight update.
    num_tokens : int
        Tokens of the iteration on all replicas; 0: unknown.
    layers : tuple of str
        Layers of each rank; empty if unknown.
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
    """None if the module does not split the microbatch."""
    start_ns: int
    end_ns: int
    strategy: str
    activation_bytes: int

    @property
    def unit(self) -> str:
        """Microbatch and, if split, sub-microbatch: ``3`` or ``3.1``."""
        return f"{self.microbatch}" if self.sub_microbatch is None else f"{self.microbatch}.{self.sub_microbatch}"

    @property
    def name(self) -> str:
        """Short name: ``F vision.0 3.1``."""
        return f"{self.kind} {self.chunk} {self.unit}"


@dataclass(frozen=True, slots=True)
class Figures:
    """Key figures of a track."""

    makespan_ns: int
    """Makespan of the pipeline."""
    iteration_ns: int
    """Makespan plus the time after the pipeline."""
    bubble_share: float
    """Idle share of all ranks' time, between 0 and 1."""
    peak_bytes: int
    """Largest peak memory of any rank, static bytes included."""
    lower_bound_ns: int | None
    lower_bound_name: str
    tokens_per_s: float | None = None

    @property
    def gap(self) -> float | None:
        """Makespan divided by the lower bound, minus one; None without a bound."""
        return None if not self.lower_bound_ns else gap(self.makespan_ns, self.lower_bound_ns)


def make_track(
    title: str,
    graph: TaskGraph,
    schedule: Schedule | None,
    timeline: Timeline,
    lower_bound: LowerBound | None = None,
    chunk_names: tuple[str, ...] = (),
) -> Track:
    """Make the track of a schedule and its timeline, with the chosen candidates applied to the graph."""
    if schedule is None or schedule.candidate is None or graph.candidates is None:
        return Track(title, graph, timeline, lower_bound, chunk_names)
    chosen = np.asarray(schedule.candidate).tolist()
    strategies = tuple(options[index].strategy for options, index in zip(graph.candidates, chosen, strict=True))
    graph = graph.with_candidates(schedule.candidate)
    return Track(title, graph, timeline, lower_bound, chunk_names, strategies)


def key_figures(track: Track) -> Figures:
    """Compute the key figures of a track."""
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
    """Return the layers of each rank, by the first and last of each chunk: ``vision 0-15, lm 0-3, lm 16-19``."""
    return tuple(
        ", ".join(
            f"{chunk.module} {chunk.layers[0]}-{chunk.layers[1]}" for chunk in layout.chunks if chunk.rank == rank
        )
        for rank in range(layout.num_ranks)
    )


def boxes(track: Track) -> list[Box]:
    """Return all tasks of a track, sorted by start."""
    graph, labels = track.graph, track.graph.labels
    split = _split_units(graph)
    start, end = track.timeline.start_ns.tolist(), track.timeline.end_ns.tolist()
    drawn = []
    for task in np.lexsort((np.arange(graph.num_tasks), track.timeline.start_ns)).tolist():
        pair, module = int(graph.pair[task]), graph.module_names[graph.module[task]]
        microbatch, sub, chunk = int(graph.microbatch[task]), None, module
        if labels is not None:
            label = labels[pair]
            if (module, microbatch) in split:
                sub = label.sub_microbatch
            if label.chunk < len(track.chunk_names):
                chunk = track.chunk_names[label.chunk]
        drawn.append(
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
    return drawn


def _split_units(graph: TaskGraph) -> set[tuple[str, int]]:
    """Return the modules and microbatches with several sub-microbatches."""
    subs: dict[tuple[str, int], set[int]] = defaultdict(set)
    for pair, label in enumerate(graph.labels or ()):
        task = int(graph.forward_of[pair])
        subs[graph.module_names[graph.module[task]], int(graph.microbatch[task])].add(label.sub_microbatch)
    return {unit for unit, parts in subs.items() if len(parts) > 1}
