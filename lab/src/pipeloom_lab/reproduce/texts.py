"""Titles, columns and notes of the parts' tables, from ``PAPER/tables.toml``.

Experiments pass rows and the values that texts quote; ``{name}`` stands for a value, and ``"*name"`` among the columns
for several.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from pipeloom_lab.reproduce.part import Table, read_data


def make_table(name: str, rows: Iterable[tuple[str, ...]], /, **values: Any) -> Table:
    """Make the table ``PAPER/NAME`` with these rows."""
    paper, _, key = name.partition("/")
    text = read_texts(paper)[key]
    columns = list[str]()
    for column in text["columns"]:
        columns += values[column[1:]] if column.startswith("*") else [column.format_map(values)]
    title, note = text["title"].format_map(values), text.get("note", "").format_map(values)
    return Table(title, tuple(columns), tuple(rows), note)


def make_note(name: str, /, **values: Any) -> str:
    """Make the note ``PAPER/NAME``, for notes of no single table."""
    paper, _, key = name.partition("/")
    note: str = read_texts(paper)["notes"][key]
    return note.format_map(values)


@functools.cache
def read_texts(paper: str) -> dict[str, Any]:
    """Read the texts of a paper by table name; ``notes`` has the texts of no single table."""
    return read_data(f"{paper}/tables")
