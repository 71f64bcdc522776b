"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeloom.report.any_width import Table
from pipeloom.report.track import Track, key_figures
from pipeloom.units import share_text, size_text, time_text


def comparison_table(tracks: Sequence[Track], *, title: str = "", baseline: int = 0) -> Table:
    """Make a table of systems: time, speed-up, bubbles, lower bound, gap and peak memory.

    Parameters
    ----------
    baseline : int
        Index of the reference track of the speed-up.
    """
    numbers = [key_figures(track) for track in tracks]
    columns = ("system", "iteration", "speed-up", "bubbles", "lower bound", "gap", "peak memory")
    table = Table(*columns, title=title or None)
    reference = numbers[baseline].makespan_ns if numbers else 0
    best = min((n.makespan_ns for n in numbers), default=0)
    for track, n in zip(tracks, numbers, strict=True):
        table.add_row(
            track.title,
            time_text(n.makespan_ns),
            f"{reference / n.makespan_ns:.2f} x" if n.makespan_ns else "-",
            share_text(n.bubble_share),
            "-" if n.lower_bound_ns is None else time_text(n.lower_bound_ns),
            "-" if n.gap is None else share_text(n.gap),
            size_text(n.peak_bytes),
            style="bold" if n.makespan_ns == best else "",
        )
    return table


def summary_table(fields: Mapping[str, object], *, title: str = "") -> Table:
    """Make a table of names and values."""
    table = Table("field", "value", title=title or None, show_header=False)
    for name, value in fields.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(name, shown)
    return table
