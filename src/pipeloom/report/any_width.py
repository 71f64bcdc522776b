"""Tables for any width. If the columns do not fit, every row becomes a block of lines."""

from __future__ import annotations

from collections.abc import Container
from itertools import zip_longest
from typing import Any

from rich import table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.text import Text

from pipeloom.errors import visible_line

_LONGEST_WORD = 24
"""Words, such as paths, up to this length are never broken."""


class Table(table.Table):
    """A table that never truncates its cells, which are texts.

    If it is too wide, headers and texts are broken between words, but numbers are not. If it is still too wide, every
    row becomes a block: its first cell, then a line ``head: cell`` for every other non-empty cell. Columns of the
    ``headers`` have numbers, except those in ``left``.
    """

    def __init__(self, *headers: str, title: Any = None, left: Container[int] = (0,), **options: Any) -> None:
        options = {"title_justify": "left", "caption_justify": "left"} | options
        super().__init__(title=_cell(title), **options)
        for number, header in enumerate(headers):
            self.add_column(header, justify="left" if number in left else "right")

    def add_column(self, header: Any = "", *arguments: Any, **options: Any) -> None:
        """Add a column, as in rich's own table."""
        super().add_column(header, *arguments, **({"overflow": "fold"} | options))

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row, as in rich's own table; strings become one line without markup."""
        super().add_row(*(_cell(cell) for cell in cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as columns or, if these are too wide, as blocks."""
        for column in self.columns:
            column.width = None
        whole = options.update(width=1 << 20)
        natural = Measurement.get(console, whole, self).maximum
        if natural > options.max_width:
            widths = self._widths(natural, options.max_width)
            if widths is None:
                yield from self._blocks()
                return
            for column, width in zip(self.columns, widths, strict=True):
                column.width = width
        yield from super().__rich_console__(console, options)

    def _widths(self, natural: int, available: int) -> list[int] | None:
        """Return the largest widths of columns that fit into ``available``; None if words or numbers do not."""
        widths, least = [], []
        for column in self.columns:
            head, cells = str(column.header), [_plain(cell) for cell in column.cells]
            lines = [line for cell in (*cells, head) for line in cell.splitlines()]
            widths.append(max(map(cell_len, lines), default=0))
            whole = cells if column.justify == "right" else []
            words = [word for cell in (*cells, head) for word in cell.split()]
            longest = min(max(map(cell_len, words), default=0), _LONGEST_WORD)
            least.append(max(longest, *map(cell_len, whole), cell_len(head) if len(self.columns) == 1 else 0, 1))
        available -= natural - sum(widths)
        if sum(least) > available:
            return None
        while sum(widths) > available:
            # Narrow the widest column that can be narrower.
            widest = max((width, number) for number, width in enumerate(widths) if width > least[number])[1]
            widths[widest] -= 1
        return widths

    def _blocks(self) -> RenderResult:
        if self.title:
            yield _text(self.title, "table.title")
        heads = [str(column.header) if self.show_header else "" for column in self.columns]
        for row, cells in zip(self.rows, zip_longest(*(column.cells for column in self.columns)), strict=True):
            first, *rest = (_plain(cell) for cell in cells)
            style = row.style or ""
            if not self.show_header:
                yield Text(": ".join(filter(None, (first, ", ".join(filter(None, rest))))), style)
                continue
            yield Text(_field(heads[0], first), style)
            for head, cell in zip(heads[1:], rest, strict=True):
                if cell:
                    yield Padding(Text(_field(head, cell), style), (0, 0, 0, 2), expand=False)
        if self.caption:
            yield _text(self.caption, "table.caption")


def _field(head: str, cell: str) -> str:
    return f"{head}: {cell}" if head else cell


def _cell(cell: Any) -> Any:
    return Text(visible_line(cell)) if isinstance(cell, str) else cell


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _text(of: Any, style: str) -> Text:
    return Text(_plain(of), style)
