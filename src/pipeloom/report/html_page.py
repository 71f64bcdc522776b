"""One offline HTML page with Gantt charts and memory curves of tracks, drawn by Bokeh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.layouts import column
from bokeh.models import BasicTicker, ColumnDataSource, CrosshairTool, CustomJS, FixedTicker, HoverTool, Range1d

# From their own modules: the stubs of bokeh.models leave these names out.
from bokeh.models.annotations.geometry import Span
from bokeh.models.annotations.legends import Legend, LegendItem
from bokeh.models.widgets.markups import Div
from bokeh.plotting import figure

from pipeloom.errors import InputError, visible_line
from pipeloom.report import colors
from pipeloom.report.bokeh_page import bokeh_page
from pipeloom.report.page_text import page_text
from pipeloom.report.ranking import by_time, ranking_table
from pipeloom.report.table_page import FONT, STYLE, VIEWPORT, Section, sections_html
from pipeloom.report.track import KIND_WORDS, Track, boxes, key_figures
from pipeloom.taskgraph import KIND_NAMES
from pipeloom.timeline import memory_curve
from pipeloom.units import share_text, size_text, size_unit, time_text, time_unit

LANE_HEIGHT, MEMORY_HEIGHT, TOOLBAR_HEIGHT, MARGIN_LEFT, MARGIN_RIGHT = 36, 158, 32, 78, 24
AXIS_HEIGHT = 46

# Show the longest label that fits at the current zoom: "3.1", "3" or none.
_FIT_LABELS = """
const width = frame.inner_width
if (width > 0) {
  const scale = width / (range.end - range.start)
  for (const source of sources) {
    const d = source.data
    const n = d.left.length
    const text = new Array(n)
    for (let i = 0; i < n; i++) {
      const room = (d.right[i] - d.left[i]) * scale - 3
      text[i] = d.unit[i].length * 6.4 <= room ? d.unit[i]
              : d.short[i].length * 6.4 <= room ? d.short[i] : ""
    }
    d.label = text
    source.change.emit()
  }
}
"""

# Blocks of Bokeh's template. A finished page must not be edited, since its scripts contain HTML tags as text.
_TEMPLATE = """
{% block postamble %}{{ head }}{% endblock %}
{% block inner_body %}{{ above }}{{ super() }}{% endblock %}
"""


def html_page(
    tracks: Sequence[Track], *, title: str, note: str = "", ranked: bool = False, sections: Sequence[Section] = ()
) -> str:
    """Draw tracks below each other on one time axis.

    Every track is a Gantt chart of its ranks (light: forward, dark: backward, one hue per module, hatched: idle) with
    key figures above, a dashed line at the lower bound and, if sizes are known, memory curves below. Hovering over a
    task shows its details. All tracks zoom and pan together.

    Parameters
    ----------
    tracks : sequence of Track
        For example planned and measured, or one per system.
    title, note : str
        Heading of the page and the line below it.
    ranked : bool
        Sort the tracks, which are systems on one batch, by iteration time, and show their ranking first.
    sections : sequence of Section
        Sections above the tracks.

    Returns
    -------
    str
        A complete HTML page that needs no network.
    """
    if not tracks:
        raise InputError("tracks", "is empty", "give at least one track")
    ranking = ""
    if ranked:
        ranking = ranking_table(tracks)
        tracks = by_time(tracks)
    longest = max(track.timeline.makespan_ns for track in tracks) or 1
    unit_ns, unit = time_unit(longest)
    span = Range1d(start=0, end=longest / unit_ns * 1.01, bounds=(-0.02 * longest / unit_ns, 1.06 * longest / unit_ns))
    hues = colors.module_hues(name for track in tracks for name in track.graph.module_names)
    # Tooltips compare a task with the first track, such as measured with planned, if both have the same tasks.
    reference = tracks[0]
    crosshair = Span(dimension="height", line_color=colors.FAINT, line_width=1, line_dash="dotted")
    above = sections_html(sections, title=title, note=note) if sections else ""
    heading = _heading("Timelines", "", tracks, hues) if above else _heading(title, note, tracks, hues)
    children: list[Any] = [_text(part) for part in (heading, ranking) if part]
    sources: list[ColumnDataSource] = []
    frames: list[Any] = []
    ruled: dict[str, Any] = {"border-top": "1px solid #d9dce2", "padding-top": "8px", "margin-top": "14px"}
    for i, track in enumerate(tracks):
        children.append(_text(_numbers(track), styles=ruled))
        gantt, source = _gantt(track, span, unit_ns, hues, reference if i else None)
        plots = [gantt]
        if key_figures(track).peak_bytes:
            plots.append(_memory(track, span, unit_ns, unit))
        else:
            gantt.height += AXIS_HEIGHT
            gantt.xaxis.visible = True
            gantt.xaxis.axis_label = f"time, {unit}"
        for plot in plots:
            plot.add_tools(CrosshairTool(overlay=crosshair))
        children += plots
        sources.append(source)
        frames.append(gantt)
    fit = CustomJS(args={"sources": sources, "range": span, "frame": frames[0]}, code=_FIT_LABELS)
    span.js_on_change("start", fit)
    span.js_on_change("end", fit)
    frames[0].js_on_change("inner_width", fit)
    whole = column(children, sizing_mode="stretch_width", spacing=0)
    return bokeh_page(whole, title, _TEMPLATE, head=f"{VIEWPORT}<style>{STYLE}</style>", above=above)


def _text(made: str, **options: Any) -> Div:
    """Make an HTML block between the plots, without formulas."""
    return Div(text=made, sizing_mode="stretch_width", disable_math=True, **options)


def _gantt(
    track: Track, span: Range1d, unit_ns: int, hues: dict[str, str], reference: Track | None
) -> tuple[Any, ColumnDataSource]:
    ranks = track.graph.num_ranks
    source = ColumnDataSource(_columns(track, unit_ns, hues, reference))
    plot = _lane_plot(ranks, span, first=reference is None)
    end = track.timeline.makespan_ns / unit_ns
    lanes = ColumnDataSource({"rank": list(range(ranks)), "end": [end] * ranks, "zero": [0.0] * ranks})
    plot.hbar(
        y="rank",
        left="zero",
        right="end",
        height=0.84,
        source=lanes,
        fill_color=colors.LANE,
        line_color=None,
        hatch_pattern="right_diagonal_line",
        hatch_color="#c3c8d2",
        hatch_scale=7,
        hatch_weight=0.8,
    )
    bars = plot.quad(
        left="left",
        right="right",
        top="top",
        bottom="bottom",
        source=source,
        fill_color="fill",
        line_color="edge",
        line_width=0.6,
        hover_line_color=colors.INK,
        hover_fill_color="fill",
    )
    plot.text(
        x="middle",
        y="rank",
        text="label",
        source=source,
        text_color="ink",
        text_font_size="10.5px",
        text_font=value(FONT),
        text_align="center",
        text_baseline="middle",
    )
    if track.lower_bound is not None and track.lower_bound.ns:
        plot.add_layout(_line(track.lower_bound.ns / unit_ns, "height", colors.BOUND, "dashed", 1.6))
    plot.add_layout(_line(end, "height", colors.INK, "solid", 1.4))
    plot.add_tools(_task_hover(bars, reference))
    return plot, source


def _lane_plot(ranks: int, span: Range1d, *, first: bool) -> Any:
    """Make an empty Gantt chart with one lane per rank; the first one on a page has the toolbar."""
    plot = _plot(
        span,
        height=LANE_HEIGHT * ranks + 8 + (TOOLBAR_HEIGHT if first else 0),
        y_range=Range1d(start=ranks - 0.42, end=-0.58),
        tools="xpan,xwheel_zoom,xbox_zoom,xzoom_in,xzoom_out,reset,save",
        toolbar_location="above" if first else None,
    )
    plot.yaxis.ticker = FixedTicker(ticks=list(range(ranks)))
    plot.yaxis.major_label_overrides = {rank: f"rank {rank}" for rank in range(ranks)}
    plot.xaxis.visible = False  # the axis is below the memory curve
    return plot


def _task_hover(bars: Any, reference: Track | None) -> HoverTool:
    """Make the tooltip of a task."""
    compared = f"<br>{page_text(reference.title)}: @reference" if reference is not None else ""
    return HoverTool(
        renderers=[bars],
        point_policy="follow_mouse",
        tooltips=(
            f'<div style="font: 12px {FONT}; line-height: 1.45"><b>@name</b> &middot; @words'
            "<br>start @start, end @end, <b>@duration</b>"
            f"{compared}<br>rank @rank, strategy @strategy, @activation held<br>"
            f'<span style="color:{colors.FAINT}">task @task of @module</span></div>'
        ),
    )


def _columns(track: Track, unit_ns: int, hues: dict[str, str], reference: Track | None) -> dict[str, list[Any]]:
    """Return the data of all boxes as columns."""
    drawn = boxes(track)
    fills = {(name, kind): colors.fill(hue, kind) for name, hue in hues.items() for kind in KIND_NAMES}
    fill = [fills[box.module, box.kind] for box in drawn]
    inks = {color: colors.text_on(color) for color in set(fill)}
    edges = {color: colors.mix(color, "#000000", 0.22) for color in inks}
    planned = [""] * len(drawn)
    if reference is not None and _same_tasks(reference, track):
        start, end = reference.timeline.start_ns, reference.timeline.end_ns
        planned = [
            f"start {time_text(int(start[box.task]))}, {time_text(int(end[box.task] - start[box.task]))}"
            for box in drawn
        ]
    return {
        "left": [box.start_ns / unit_ns for box in drawn],
        "right": [box.end_ns / unit_ns for box in drawn],
        "middle": [(box.start_ns + box.end_ns) / 2 / unit_ns for box in drawn],
        "top": [box.rank - 0.42 for box in drawn],
        "bottom": [box.rank + 0.42 for box in drawn],
        "rank": [box.rank for box in drawn],
        "fill": fill,
        "edge": [edges[color] for color in fill],
        "ink": [inks[color] for color in fill],
        "unit": [box.unit for box in drawn],
        "short": [str(box.microbatch) for box in drawn],
        "label": [""] * len(drawn),
        "name": [visible_line(box.name) for box in drawn],
        "words": [KIND_WORDS[box.kind] for box in drawn],
        "start": [time_text(box.start_ns) for box in drawn],
        "end": [time_text(box.end_ns) for box in drawn],
        "duration": [time_text(box.end_ns - box.start_ns) for box in drawn],
        "strategy": [visible_line(box.strategy or "keep") for box in drawn],
        "activation": [size_text(box.activation_bytes) for box in drawn],
        "module": [visible_line(box.module) for box in drawn],
        "task": [box.task for box in drawn],
        "reference": planned,
    }


def _same_tasks(one: Track, other: Track) -> bool:
    """Return whether task numbers have the same meaning in both tracks."""
    columns = ("kind", "rank", "pair", "pass_id", "microbatch")
    return all(np.array_equal(getattr(one.graph, name), getattr(other.graph, name)) for name in columns)


def _memory(track: Track, span: Range1d, unit_ns: int, unit: str) -> Any:
    graph = track.graph
    curves = [memory_curve(graph, track.timeline, rank) for rank in range(graph.num_ranks)]
    capacity = None if graph.capacity_bytes is None else int(graph.capacity_bytes.max())
    top = max(*(int(sizes.max()) for _, sizes in curves), 1)
    # Leave out the capacity if it is so large that it would flatten the curves.
    shown = capacity is not None and capacity <= 3 * top
    scale, name = size_unit(max(top, capacity or 0) if shown else top)
    height = 1.08 * max(top, capacity or 0) if shown else 1.08 * top
    y_range = Range1d(start=0, end=height / scale)
    plot = _plot(span, height=MEMORY_HEIGHT, y_range=y_range, tools="xpan,xwheel_zoom,reset", toolbar_location=None)
    plot.ygrid.grid_line_color = "#e6e8ed"
    plot.yaxis.axis_label = f"memory, {name}"
    plot.yaxis.ticker = BasicTicker(desired_num_ticks=3)
    plot.xaxis.axis_label = f"time, {unit}"
    items, end = [], track.timeline.makespan_ns
    for rank, (moments, sizes) in enumerate(curves):
        moments, sizes = np.append(moments, max(end, int(moments[-1]))), np.append(sizes, sizes[-1])
        source = ColumnDataSource({"x": moments / unit_ns, "y": sizes / scale, "rank": [rank] * len(moments)})
        line: Any = plot.step(
            x="x",
            y="y",
            source=source,
            mode="after",
            line_width=1.7,
            line_alpha=0.9,
            line_color=colors.RANK_LINES[rank % len(colors.RANK_LINES)],
        )
        items.append(LegendItem(label=f"rank {rank}", renderers=[line]))
        plot.add_tools(
            HoverTool(renderers=[line], mode="mouse", tooltips=f"rank @rank: @y{{0.00}} {name} at @x{{0.000}} {unit}")
        )
    if shown and capacity is not None:
        plot.add_layout(_line(capacity / scale, "width", colors.BOUND, "dotted", 1.4))
    look: Any = {
        "orientation": "horizontal",
        "location": "left",
        "label_text_font_size": "10px",
        "spacing": 10,
        "label_text_font": FONT,
        "glyph_width": 14,
        "padding": 2,
        "margin": 2,
        "border_line_color": None,
        "click_policy": "mute",
    }
    plot.add_layout(Legend(items=items, **look), "above")  # not inside, where the curves are
    return plot


def _plot(span: Range1d, **options: Any) -> Any:
    """Make an empty plot over the shared time axis."""
    plot: Any = figure(
        sizing_mode="stretch_width",
        x_range=span,
        active_scroll="xwheel_zoom",
        active_drag="xpan",
        min_border_left=MARGIN_LEFT,
        min_border_right=MARGIN_RIGHT,
        **options,
    )
    plot.outline_line_color = None
    plot.grid.grid_line_color = None
    plot.toolbar.logo = None
    plot.axis.axis_line_color = None
    plot.axis.major_tick_line_color = "#c3c8d2"
    plot.axis.minor_tick_line_color = None
    plot.axis.major_label_text_color = colors.INK
    plot.axis.major_label_text_font = FONT
    plot.axis.axis_label_text_font = FONT
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.axis_label_text_font_size = "11px"
    plot.axis.axis_label_text_color = colors.FAINT
    return plot


def _line(position: float, dimension: Any, color: str, dash: Any, width: float) -> Span:
    """Make a line across a plot."""
    return Span(location=position, dimension=dimension, line_color=color, line_dash=dash, line_width=width)


def _heading(title: str, note: str, tracks: Sequence[Track], hues: dict[str, str]) -> str:
    kinds = sorted({int(kind) for track in tracks for kind in np.unique(track.graph.kind)})
    swatch = '<span style="display:inline-block;width:13px;height:13px;border-radius:2px;vertical-align:-2px;'
    entries = []
    for module, hue in hues.items():
        tones = "".join(
            f'{swatch}background:{colors.fill(hue, KIND_NAMES[kind])};margin-right:3px" '
            f'title="{KIND_WORDS[KIND_NAMES[kind]]}"></span>'
            for kind in kinds
        )
        entries.append(f'<span style="margin-right:22px;white-space:nowrap">{tones} {page_text(module)}</span>')
    order = ", ".join(KIND_WORDS[KIND_NAMES[kind]] for kind in kinds)
    idle = (
        f"{swatch}background:repeating-linear-gradient(45deg,{colors.LANE},{colors.LANE} 3px,#c3c8d2 3px,"
        '#c3c8d2 4px)"></span> idle'
    )
    bound = f'<span style="color:{colors.BOUND};letter-spacing:-1px">- - -</span> lower bound'
    note = f'<div style="color:{colors.FAINT};margin-top:3px">{page_text(note)}</div>' if note else ""
    return (
        f'<div style="font-family:{FONT};color:{colors.INK}">'
        f'<div style="font-size:22px;font-weight:600">{page_text(title)}</div>{note}'
        f'<div style="font-size:12.5px;margin:12px 0 4px">{"".join(entries)}'
        f'<span style="color:{colors.FAINT};margin-right:22px;display:inline-block">({order})</span>'
        f'<span style="margin-right:22px;white-space:nowrap">{idle}</span>'
        f'<span style="white-space:nowrap">{bound}</span></div></div>'
    )


def _numbers(track: Track) -> str:
    """Return the line above a track: its title and key figures."""
    n = key_figures(track)
    fields = [("iteration", time_text(n.iteration_ns))]
    if track.after_ns:
        fields.append(("of which pipeline", time_text(n.makespan_ns)))
    if n.lower_bound_ns is not None:
        fields.append(("lower bound", f"{time_text(n.lower_bound_ns)} ({page_text(n.lower_bound_name)})"))
    if n.gap is not None:
        fields.append(("gap", share_text(n.gap)))
    fields.append(("bubbles", share_text(n.bubble_share)))
    if n.peak_bytes:
        fields.append(("peak memory", size_text(n.peak_bytes)))
    shown = "".join(
        f'<span style="display:inline-block;white-space:nowrap;margin-right:22px">'
        f'<span style="color:{colors.FAINT}">{name}</span> <b>{value}</b></span>'
        for name, value in fields
    )
    return (
        f'<div style="font-family:{FONT};color:{colors.INK};font-size:13px">'
        f'<span style="font-size:15px;font-weight:600;margin-right:22px">{page_text(track.title)}</span>'
        f"{shown}{_layers(track)}</div>"
    )


def _layers(track: Track) -> str:
    """Return a collapsed list of the layers on each rank."""
    if not track.layers:
        return ""
    rows = "".join(f"<tr><td>rank {rank}</td><td>{page_text(text)}</td></tr>" for rank, text in enumerate(track.layers))
    return (
        f'<details style="margin:4px 0;color:{colors.FAINT}"><summary>layers on each rank</summary>'
        f'<table style="font-size:12px;margin:4px 0 6px 14px;border-spacing:10px 1px">{rows}</table></details>'
    )
