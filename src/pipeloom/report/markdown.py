"""Generated Markdown: tables, and pages of named sections that can be replaced one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_SECTION = re.compile(r"^<!-- ([\w-]+) -->\n(.*?)(?=^<!-- [\w-]+ -->\n|\Z)", re.MULTILINE | re.DOTALL)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: bool = False) -> str:
    """Write a table. The first column is aligned left, the others right, or left if they are ``words``.

    Parameters
    ----------
    rows : sequence of sequence of str
        Rows, each as long as ``columns``.
    """
    lines = [_row(columns), "|" + "---|" + ("---|" if words else "---:|") * (len(columns) - 1)]
    return "\n".join([*lines, *(_row(row) for row in rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def sections(page: str) -> dict[str, str]:
    """Return the sections of a page by name. Each begins with a line ``<!-- name -->``, which is not part of it."""
    return {name: body.strip() for name, body in _SECTION.findall(page)}


def join_sections(head: str, order: Sequence[str], bodies: Mapping[str, str]) -> str:
    """Join ``head`` and the existing sections in ``order`` to a page."""
    parts = [f"<!-- {name} -->\n{bodies[name].strip()}\n" for name in order if name in bodies]
    return "\n".join([f"{head.strip()}\n", *parts])
