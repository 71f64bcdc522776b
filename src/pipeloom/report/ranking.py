"""Ranking of systems on one batch, for the comparison page."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.report import colors
from pipeloom.report.page_text import page_text
from pipeloom.report.track import Track, key_figures
from pipeloom.units import share_text, size_text, time_text

_HEADER = ("", "system", "iteration", "gain over {first}", "bubbles", "peak memory", "tokens/s", "above its bound")
_TEXT_COLUMNS = 2


def by_time(tracks: Sequence[Track]) -> list[Track]:
    """Sort tracks by iteration time, the fastest first."""
    return sorted(tracks, key=lambda track: key_figures(track).iteration_ns)


def ranking_rows(tracks: Sequence[Track]) -> list[tuple[str, ...]]:
    """Return the table rows of systems, the fastest first. Gains are relative to the first track given.

    Parameters
    ----------
    tracks : sequence of Track
        Tracks in the order of the systems' names.

    Returns
    -------
    list of tuple of str
        Place, title, iteration time, gain, bubbles, largest peak memory, tokens per second, and gap to the lower bound
        of the system's own layout.
    """
    first = key_figures(tracks[0]).iteration_ns
    rows: list[tuple[str, ...]] = []
    for place, track in enumerate(by_time(tracks), 1):
        n = key_figures(track)
        gain = f"{first / n.iteration_ns - 1:+.1%}" if n.iteration_ns and track is not tracks[0] else ""
        rows.append(
            (
                str(place),
                track.title,
                time_text(n.iteration_ns),
                gain,
                share_text(n.bubble_share),
                size_text(n.peak_bytes),
                "" if n.tokens_per_s is None else f"{n.tokens_per_s:,.0f}",
                "" if n.gap is None else share_text(n.gap),
            )
        )
    return rows


def ranking_table(tracks: Sequence[Track]) -> str:
    """Draw the ranking as an HTML table."""
    rows = ranking_rows(tracks)
    # Leave out columns without values.
    shown = [column for column in range(len(_HEADER)) if any(row[column] for row in rows)]
    head = [_HEADER[column].format(first=tracks[0].title) for column in shown]
    rows = [tuple(row[column] for column in shown) for row in rows]
    body = "".join(
        f'<tr style="font-weight:{600 if number == 0 else 400}">{_cells(row, "td")}</tr>'
        for number, row in enumerate(rows)
    )
    return (
        f'<table style="border-collapse:collapse;font-size:13px;color:{colors.INK};margin:8px 0 14px">'
        f'<thead style="color:{colors.FAINT}"><tr>{_cells(head, "th")}</tr></thead><tbody>{body}</tbody></table>'
    )


def _cells(row: Sequence[str], tag: str) -> str:
    style = "padding:3px 18px 3px 0;border-bottom:1px solid #e6e8ed;font-weight:inherit;text-align:"
    return "".join(
        f'<{tag} style="{style}{"left" if column < _TEXT_COLUMNS else "right"}">{page_text(cell)}</{tag}>'
        for column, cell in enumerate(row)
    )
