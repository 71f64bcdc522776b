"""Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [" | ".join(header), "---|" + "|".join("---:" for _ in header[1:])]
    lines += [" | ".join(row) for row in rows]
    return "\n".join(f"| {line} |" if not line.startswith("---") else f"|{line}|" for line in lines)
