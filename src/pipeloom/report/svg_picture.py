"""A static SVG picture of tracks on one time axis, for READMEs and papers."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape as escape_xml
from xml.sax.saxutils import quoteattr

import numpy as np

from pipeloom.errors import InputError, visible_line
from pipeloom.report import colors
from pipeloom.report.track import KIND_WORDS, Track, boxes, key_figures
from pipeloom.taskgraph import KIND_NAMES
from pipeloom.units import share_text, time_text, time_unit

_LEFT, _RIGHT, _LANE, _GAP, _HEAD, _TOP, _FOOT = 62, 96, 22, 3, 24, 34, 34
_STYLE = (
    "text{font-family:Inter,'Helvetica Neue','Segoe UI',Arial,sans-serif;font-size:11px;"
    f"fill:{colors.INK}}}.h{{font-size:13px;font-weight:600}}.f{{fill:{colors.FAINT}}}"
    ".u{font-size:9px;text-anchor:middle}.e{text-anchor:end}.m{text-anchor:middle}"
)


def timeline_svg(tracks: Sequence[Track], *, width: int = 1100) -> str:
    """Draw the Gantt charts of several tracks below each other.

    Parameters
    ----------
    tracks : sequence of Track
        Tracks, each drawn with its title and iteration time, on the time axis of the longest.
    width : int
        Width in pixels.

    Returns
    -------
    str
        A complete SVG document.
    """
    if not tracks:
        raise InputError("tracks", "is empty", "give at least one track")
    longest = max(track.timeline.makespan_ns for track in tracks) or 1
    scale = (width - _LEFT - _RIGHT) / longest
    hues = colors.module_hues(name for track in tracks for name in track.graph.module_names)
    parts = [_legend(tracks, hues)]
    y = float(_TOP)
    for track in tracks:
        parts += _track(track, y, scale, hues)
        y += _HEAD + track.graph.num_ranks * (_LANE + _GAP) + 12
    parts += _axis(longest, scale, y)
    height = y + _FOOT
    label = f"Timelines of {', '.join(track.title for track in tracks)}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" '
        f'height="{height:g}" role="img" aria-label={quoteattr(visible_line(label))}>'
    )
    pattern = (
        '<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" fill="{colors.LANE}"/><rect width="1" height="6" fill="#c9ced8"/></pattern>'
    )
    body = "\n".join(parts)
    return (
        f"{head}\n<defs>{pattern}</defs>\n<style>{_STYLE}</style>\n"
        f'<rect width="100%" height="100%" fill="{colors.PAPER}"/>\n{body}\n</svg>\n'
    )


def _track(track: Track, y: float, scale: float, hues: dict[str, str]) -> list[str]:
    numbers = key_figures(track)
    words = [f"bubbles {share_text(numbers.bubble_share)}"]
    if numbers.gap is not None:
        words.append(f"{share_text(numbers.gap)} above the lower bound")
    end = _LEFT + numbers.makespan_ns * scale
    top, lanes = y + _HEAD, track.graph.num_ranks * (_LANE + _GAP) - _GAP
    parts = [
        f'<text class="h" x="{_LEFT}" y="{y + 15:g}">{escape(track.title)}'
        f'<tspan class="f" dx="12" font-weight="400" font-size="11">{escape(", ".join(words))}</tspan></text>'
    ]
    for rank in range(track.graph.num_ranks):
        lane = top + rank * (_LANE + _GAP)
        parts.append(f'<text class="e f" x="{_LEFT - 8}" y="{lane + _LANE / 2 + 4:g}">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{lane:g}" width="{end - _LEFT:.2f}" height="{_LANE}" fill="url(#idle)"/>')
    for box in boxes(track):
        if box.end_ns == box.start_ns:
            continue
        x, wide = _LEFT + box.start_ns * scale, (box.end_ns - box.start_ns) * scale
        lane = top + box.rank * (_LANE + _GAP)
        color = colors.fill(hues[box.module], box.kind)
        inside = wide - min(0.6, wide / 4)
        parts.append(
            f'<rect x="{x:.2f}" y="{lane:g}" width="{inside:.2f}" height="{_LANE}" fill="{color}">'
            f"<title>{escape(box.name)}, {time_text(box.end_ns - box.start_ns)}</title></rect>"
        )
        label = next((t for t in (box.unit, str(box.microbatch)) if 5.2 * len(t) + 2 <= wide), "")
        if label:
            parts.append(
                f'<text class="u" x="{x + inside / 2:.2f}" y="{lane + _LANE / 2 + 3.2:g}" '
                f'style="fill:{colors.text_on(color)}">{label}</text>'
            )
    if numbers.lower_bound_ns:
        x = _LEFT + numbers.lower_bound_ns * scale
        parts.append(
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{top - 3:g}" y2="{top + lanes + 3:g}" '
            f'stroke="{colors.BOUND}" stroke-width="1.4" stroke-dasharray="5 3"/>'
        )
    parts.append(
        f'<line x1="{end:.2f}" x2="{end:.2f}" y1="{top - 3:g}" y2="{top + lanes + 3:g}" '
        f'stroke="{colors.INK}" stroke-width="1.4"/>'
    )
    parts.append(
        f'<text class="h" x="{end + 7:.2f}" y="{top + lanes / 2 + 4:g}">{time_text(numbers.makespan_ns)}</text>'
    )
    return parts


def _legend(tracks: Sequence[Track], hues: dict[str, str]) -> str:
    kinds = sorted({int(kind) for track in tracks for kind in np.unique(track.graph.kind)})
    x, parts = float(_LEFT), []

    def entry(fill: str, text: str, gap: float) -> None:
        nonlocal x
        parts.append(f'<rect x="{x:g}" y="8" width="12" height="12" rx="2" fill="{fill}"/>')
        parts.append(f'<text x="{x + 17:g}" y="18">{escape(text)}</text>')
        x += 17 + 6.2 * len(text) + gap

    for module, hue in hues.items():
        for kind in kinds:
            name = KIND_NAMES[kind]
            entry(colors.fill(hue, name), f"{module} {KIND_WORDS[name]}", 14)
    entry("url(#idle)", "idle", 14)
    if any(track.lower_bound is not None for track in tracks):
        parts.append(
            f'<line x1="{x:g}" x2="{x + 14:g}" y1="14" y2="14" stroke="{colors.BOUND}" stroke-width="1.4" '
            f'stroke-dasharray="5 3"/><text x="{x + 19:g}" y="18">lower bound</text>'
        )
    return "".join(parts)


def _axis(longest: int, scale: float, y: float) -> list[str]:
    """Draw the time axis with at most twelve ticks at one, two or five times a power of ten."""
    unit_ns, unit = time_unit(longest)
    step = next(s for s in _steps() if longest / s <= 12)
    parts = [f'<line x1="{_LEFT}" x2="{_LEFT + longest * scale:.2f}" y1="{y:g}" y2="{y:g}" stroke="#c3c8d2"/>']
    for moment in range(0, longest + 1, step):
        x = _LEFT + moment * scale
        parts.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{y:g}" y2="{y + 4:g}" stroke="#c3c8d2"/>')
        parts.append(f'<text class="m f" x="{x:.2f}" y="{y + 16:g}">{moment / unit_ns:g}</text>')
    parts.append(f'<text class="f" x="{_LEFT + longest * scale + 14:.2f}" y="{y + 16:g}">{unit}</text>')
    return parts


def _steps() -> list[int]:
    return [factor * 10**power for power in range(19) for factor in (1, 2, 5)]


def escape(text: str) -> str:
    """Return text for an XML element. XML allows no control characters, not even escaped."""
    return escape_xml(visible_line(text))
