"""Conversion of an emulated iteration to a track."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.iteration import TimedIteration
from pipeloom.report.track import Track, make_track
from pipeloom.taskgraph import NS_PER_S


def emulated_track(
    title: str, iteration: TimedIteration, chunk_names: tuple[str, ...] = (), num_tokens: int = 0
) -> Track:
    """Convert an emulated iteration to a track.

    Its memory curve has no workspace, its peak has.

    Parameters
    ----------
    num_tokens : int
        Tokens of the iteration on all replicas; 0: unknown.
    """
    timeline = replace(iteration.timeline, peak_bytes=iteration.peak_bytes)
    track = make_track(title, iteration.graph, iteration.schedule, timeline, None, chunk_names)
    after_ns = round((iteration.iteration_s - iteration.pipeline_s) * NS_PER_S)
    return replace(track, after_ns=after_ns, num_tokens=num_tokens)
