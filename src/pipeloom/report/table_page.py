"""An offline HTML page of tables and texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeloom.report import colors
from pipeloom.report.page_text import page_text

FONT = "Inter, 'Helvetica Neue', 'Segoe UI', Arial, sans-serif"
STYLE = f"""
 html body {{ margin: 22px 28px; background: {colors.PAPER}; color: {colors.INK}; font: 13.5px {FONT}; }}
 @media (max-width: 600px) {{ html body {{ margin: 14px 12px; }} }}
 main {{ max-width: 64em; line-height: 1.4; margin-bottom: 34px; }}
 h1 {{ font-size: 22px; font-weight: 600; margin: 0 0 4px; }}
 h2 {{ font-size: 15px; font-weight: 600; margin: 26px 0 6px; }}
 p {{ color: {colors.FAINT}; margin: 3px 0 8px; }}
 p.lead {{ color: {colors.INK}; font-size: 15px; }}
 .wide {{ overflow-x: auto; }}
 table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
 th, td {{ padding: 3px 16px 3px 0; text-align: right; border-bottom: 1px solid #e6e8ed; font-weight: normal;
          white-space: nowrap; }}
 th {{ color: {colors.FAINT}; }}
 th:first-child, td:first-child {{ text-align: left; }}
 tr.total td {{ font-weight: 600; }}
 pre {{ background: {colors.LANE}; padding: 8px 12px; margin: 4px 0 10px; font-size: 12.5px; white-space: pre-wrap;
       overflow-wrap: anywhere; }}
"""


VIEWPORT = '<meta name="viewport" content="width=device-width, initial-scale=1">'
"""Without it, phones scale a page of desktop width down."""


class TableSection(NamedTuple):
    """A heading, a note with one paragraph per line, and a table. Rows with numbers in ``totals`` are bold."""

    heading: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    totals: frozenset[int] = frozenset()


class TextSection(NamedTuple):
    """A heading, a note with one paragraph per line, and preformatted lines."""

    heading: str
    note: str
    lines: Sequence[str]


Section = TableSection | TextSection


def table_page(sections: Sequence[Section], *, title: str, note: str = "") -> str:
    """Make an offline HTML page of sections. The first column of a table is text, the others are numbers."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{page_text(title)}</title>{VIEWPORT}'
        f"<style>{STYLE}</style></head>\n<body>{sections_html(sections, title=title, note=note)}</body></html>\n"
    )


def sections_html(sections: Sequence[Section], *, title: str, note: str = "") -> str:
    """Return heading, note and sections for a page with `STYLE`."""
    lead = f'<p class="lead">{page_text(note)}</p>' if note else ""
    return f"<main><h1>{page_text(title)}</h1>{lead}{''.join(map(_section, sections))}</main>"


def _section(section: Section) -> str:
    note = "".join(f"<p>{page_text(line)}</p>" for line in section.note.splitlines())
    top = f"\n<h2>{page_text(section.heading)}</h2>{note}"
    if isinstance(section, TextSection):
        text = page_text("\n".join(section.lines))
        return f"{top}<pre>{text}</pre>" if text else top
    head = "".join(f"<th>{page_text(cell)}</th>" for cell in section.header)
    rows = "".join(
        f'<tr class="total">{_cells(row)}</tr>' if number in section.totals else f"<tr>{_cells(row)}</tr>"
        for number, row in enumerate(section.rows)
    )
    return f'{top}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cells(row: Sequence[str]) -> str:
    return "".join(f"<td>{page_text(cell)}</td>" for cell in row)
