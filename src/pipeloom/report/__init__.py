"""Reports of `Track`s: Chrome trace, HTML timeline, SVG picture and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeloom.errors import InputError
from pipeloom.lazy import lazy_names
from pipeloom.report.track import Box, Figures, Track, boxes, key_figures, layers_by_rank, make_track
from pipeloom.units import seconds_text, share_text, size_text, time_text

if TYPE_CHECKING:
    from pipeloom.report.chrome_trace import trace
    from pipeloom.report.emulated import emulated_track
    from pipeloom.report.markdown import join_sections, markdown_table, sections
    from pipeloom.report.svg_picture import timeline_svg
    from pipeloom.report.table_page import Section
    from pipeloom.report.tables import comparison_table, summary_table

__getattr__, __dir__ = lazy_names(__name__, __file__)

__all__ = [
    "Box",
    "Figures",
    "Track",
    "boxes",
    "comparison_table",
    "emulated_track",
    "join_sections",
    "key_figures",
    "layers_by_rank",
    "make_track",
    "markdown_table",
    "seconds_text",
    "sections",
    "share_text",
    "size_text",
    "summary_table",
    "time_text",
    "timeline_html",
    "timeline_svg",
    "trace",
]


def timeline_html(
    tracks: Sequence[Track],
    *,
    title: str = "Pipeloom timeline",
    note: str = "",
    ranked: bool = False,
    sections: Sequence[Section] = (),
) -> str:
    """Draw tracks on one offline HTML page; see `pipeloom.report.html_page.html_page`.

    Raises
    ------
    InputError
        Bokeh, an optional dependency, is not installed.
    """
    try:
        from pipeloom.report.html_page import html_page
    except ImportError as error:
        if error.name is None or not error.name.startswith("bokeh"):
            raise
        raise InputError("timeline_html", "needs Bokeh", "pip install 'pipeloom[report]'") from error
    return html_page(tracks, title=title, note=note, ranked=ranked, sections=sections)
