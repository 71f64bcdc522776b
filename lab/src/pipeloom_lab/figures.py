"""Line, bar and scatter figures as SVG text, drawn by Matplotlib (an optional dependency).

The same data gives the same bytes with the same version of Matplotlib. Colors are those of Okabe and Ito, which people
with any form of color blindness can distinguish. Series also differ in marker and dash, for figures in grayscale.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pipeloom.errors import InputError

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d1f", "#4d4d4d")
"""Colors of series in order, repeated after eight; further bars are hatched."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_REFERENCE = "#555555"
_STYLE: dict[str, Any] = {
    "svg.hashsalt": "pipeloom",
    "svg.fonttype": "none",
    "font.size": 9.0,
    "font.family": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.0,
    "figure.facecolor": "white",
}

Points = tuple[Sequence[float], Sequence[float]]
"""x and y values of equal length."""
LineStyle = Literal["dots", "plain", "steps"]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its label with the unit, its scale, and its limits (None: automatic)."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A named reference value, such as a published one, drawn as a line across the figure."""

    value: float
    name: str


def line_figure(
    series: Mapping[str, Points],
    *,
    x: Axis,
    y: Axis,
    title: str = "",
    marks: Sequence[Mark] = (),
    style: LineStyle = "dots",
    crosses: Mapping[str, Points] | None = None,
) -> str:
    """Draw one line per series.

    Parameters
    ----------
    series : mapping
        Points by name, in the order of the legend.
    marks : sequence of Mark
        Horizontal reference lines.
    style : str
        ``dots`` marks every point, ``plain`` marks none, ``steps`` keeps a value until the next point, as for the best
        value so far.
    crosses : mapping, optional
        Points by series name that are drawn as crosses in its color, such as values not reached in time.
    """
    return panel_figure({title: series}, x=x, y=y, columns=1, marks=marks, style=style, crosses={title: crosses or {}})


def panel_figure(
    panels: Mapping[str, Mapping[str, Points]],
    *,
    x: Axis,
    y: Axis,
    columns: int = 3,
    marks: Sequence[Mark] = (),
    style: LineStyle = "dots",
    crosses: Mapping[str, Mapping[str, Points]] | None = None,
) -> str:
    """Draw several line figures side by side with one legend; a series has the same color in all of them.

    Parameters
    ----------
    panels : mapping
        Series by panel title. Other parameters are those of `line_figure`, with ``crosses`` by panel.
    """
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    if not names:
        raise InputError("panels", "has no series", "give at least one")
    number = {name: i for i, name in enumerate(names)}
    across = min(columns, len(panels))
    down = -(-len(panels) // across)
    size = (6.4, 3.8) if len(panels) == 1 else (3.1 * across, 2.5 * down + 0.4)

    def draw(figure: Any) -> None:
        handles: dict[str, Any] = {}
        for place, (title, series) in enumerate(panels.items()):
            axes = figure.add_subplot(down, across, place + 1)
            axes.set_title(title)
            for name, (xs, ys) in series.items():
                _same_length(name, xs, ys)
                look = _line_look(number[name], style)
                (handles[name],) = axes.plot(xs, ys, label=name, **look)
            for name, (xs, ys) in (crosses or {}).get(title, {}).items():
                _same_length(name, xs, ys)
                axes.plot(
                    xs, ys, linestyle="", marker="x", markersize=7, markeredgewidth=1.8, color=_color(number[name])
                )
            _add_marks(axes, marks)
            _scale(axes, x, y)
            axes.set_xlabel(x.label if place >= len(panels) - across else "")
            axes.set_ylabel(y.label if place % across == 0 else "")
        _legend(figure, [handles[name] for name in names], names)

    return _render(size, draw)


def bar_figure(
    categories: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    y: Axis,
    title: str = "",
    marks: Sequence[Mark] = (),
    points: Mapping[str, Sequence[float | None]] | None = None,
    values: str | None = None,
) -> str:
    """Draw one bar per category, or a group of bars for several series.

    Parameters
    ----------
    series : mapping
        Heights by series name, one per category; None leaves a gap.
    marks : sequence of Mark
        Horizontal reference lines.
    points : mapping, optional
        Reference values of the bars (such as published ones) by series name, drawn as diamonds.
    values : str, optional
        Format of the number above each bar, such as ``.2f``.
    """
    for name, heights in [*series.items(), *(points or {}).items()]:
        _same_length(name, categories, heights)
    if not series:
        raise InputError("series", "is empty", "give at least one")
    width = 0.8 / len(series)

    def draw(figure: Any) -> None:
        axes = figure.add_subplot(1, 1, 1)
        axes.set_title(title)
        handles = []
        for i, (name, heights) in enumerate(series.items()):
            middle = [place + (i - (len(series) - 1) / 2) * width for place in range(len(categories))]
            shown = [(a, h) for a, h in zip(middle, heights, strict=True) if h is not None]
            bars = axes.bar(
                [a for a, _ in shown],
                [h for _, h in shown],
                width * 0.94,
                color=_color(i),
                hatch="////" if i >= len(COLORS) else None,
                edgecolor="white",
                linewidth=0,
            )
            handles.append(bars)
            if values is not None:
                axes.bar_label(bars, [format(h, values) for _, h in shown], padding=2, fontsize=7)
            known = [(a, p) for a, p in zip(middle, (points or {}).get(name, []), strict=False) if p is not None]
            axes.plot(
                [a for a, _ in known],
                [p for _, p in known],
                linestyle="",
                marker="D",
                color="white",
                markeredgecolor="black",
                zorder=3,
            )
        _add_marks(axes, marks)
        _scale(axes, None, y)
        axes.set_ylabel(y.label)
        axes.grid(visible=False, axis="x")
        long = sum(map(len, categories)) > 90
        axes.set_xticks(
            range(len(categories)), categories, rotation=30 if long else 0, ha="right" if long else "center"
        )
        if len(series) > 1:
            _legend(figure, handles, list(series))

    return _render((max(5.0, min(11.0, 1.2 + 0.34 * len(categories) * (len(series) + 1))), 3.6), draw)


def scatter_figure(
    series: Mapping[str, Points],
    *,
    x: Axis,
    y: Axis,
    title: str = "",
    diagonal: bool = False,
    marks: Sequence[Mark] = (),
) -> str:
    """Draw points; ``diagonal`` adds the line x = y."""
    if not series:
        raise InputError("series", "is empty", "give at least one")

    def draw(figure: Any) -> None:
        axes = figure.add_subplot(1, 1, 1)
        axes.set_title(title)
        handles = []
        for i, (name, (xs, ys)) in enumerate(series.items()):
            _same_length(name, xs, ys)
            handles += axes.plot(xs, ys, linestyle="", marker=MARKERS[i % len(MARKERS)], color=_color(i), alpha=0.75)
        if diagonal:
            everything = [float(v) for xs, ys in series.values() for v in (*xs, *ys)]
            ends = [min(everything), max(everything)]
            axes.plot(ends, ends, color=_REFERENCE, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        _add_marks(axes, marks)
        _scale(axes, x, y)
        axes.set_xlabel(x.label)
        axes.set_ylabel(y.label)
        if len(series) > 1:
            _legend(figure, handles, list(series))

    return _render((5.2, 4.2), draw)


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _line_look(number: int, style: LineStyle) -> dict[str, Any]:
    look: dict[str, Any] = {"color": _color(number), "linestyle": DASHES[number % len(DASHES)]}
    if style == "dots":
        return look | {"marker": MARKERS[number % len(MARKERS)]}
    return look | ({"drawstyle": "steps-post"} if style == "steps" else {})


def _same_length(name: str, one: Sequence[object], other: Sequence[object]) -> None:
    if len(one) != len(other):
        raise InputError(f"figure: {name}", f"{len(one)} and {len(other)} entries", "give equal numbers of both")


def _add_marks(axes: Any, marks: Sequence[Mark]) -> None:
    for mark in marks:
        axes.axhline(mark.value, color=_REFERENCE, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            mark.name,
            (1.0, mark.value),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=7.5,
            color=_REFERENCE,
        )


def _scale(axes: Any, x: Axis | None, y: Axis) -> None:
    from matplotlib.ticker import LogFormatter

    for axis, log, limit, ticks in (
        (x, axes.set_xscale, axes.set_xlim, axes.xaxis),
        (y, axes.set_yscale, axes.set_ylim, axes.yaxis),
    ):
        if axis is None:
            continue
        if axis.log:
            log("log")
            ticks.set_major_formatter("{x:g}")
            # With few powers of ten between the limits, other ticks get labels too: 2 instead of 2 x 10^0.
            ticks.set_minor_formatter(LogFormatter())
        if axis.low is not None or axis.high is not None:
            limit(axis.low, axis.high)


def _legend(figure: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
    # Width of a column in inches: the longest name at about 0.075 per letter, its line, and a gap.
    column = 0.075 * max(map(len, names)) + 0.7
    across = min(len(names), max(1, int(figure.get_figwidth() / column)))
    figure.legend(handles, names, loc="outside lower center", ncols=across, handlelength=2.6)


@contextmanager
def _matplotlib() -> Iterator[Callable[..., Any]]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        raise InputError("figure", "needs Matplotlib", "pip install 'pipeloom-lab[plot]'") from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        settings: Any = matplotlib.rcParams
        settings.update(_STYLE)
        yield Figure


def _render(size: tuple[float, float], draw: Callable[[Any], None]) -> str:
    """Draw on a canvas of ``size`` inches, without global state, date or random names."""
    with _matplotlib() as make:
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        figure = make(figsize=size, layout="constrained")
        canvas: Any = FigureCanvasSVG(figure)
        draw(figure)
        text = io.StringIO()
        canvas.print_svg(text, metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def best_so_far(times: Sequence[float], values: Sequence[float]) -> Points:
    """Drop points that are no better than an earlier one, for lines in style ``steps``."""
    _same_length("best so far", times, values)
    best: list[tuple[float, float]] = []
    for moment, value in zip(times, values, strict=True):
        if not best or value < best[-1][1]:
            best.append((moment, value))
    return [moment for moment, _ in best], [value for _, value in best]
