"""`pipeloom.rule/1`: reads and writes the priority rule of a layout, in a file beside the layout's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeloom.errors import InputError
from pipeloom.io.document import convert_format, dump, read_document, to_document
from pipeloom.io.files import PathLike, printable, write_text
from pipeloom.search.rule import ChunkRule, OrderRule
from pipeloom.spec import Layout

FORMAT = "pipeloom.rule/1"
_ALWAYS_WRITTEN: dict[type, tuple[str, ...]] = {
    OrderRule: ("format", "period", "chunks"),
    ChunkRule: (
        *("layers", "rank", "forward", "backward", "weight"),
        *("forward_wait", "backward_wait", "limit", "strategies"),
    ),
}
"""Fields that are always written. A field that was added later is omitted at its default (`docs/formats.md`)."""


def rule_path(layout_path: PathLike) -> Path:
    """Return the path of a layout's rule: ``layout.rule.json`` for ``layout.json``."""
    path = Path(layout_path)
    packed = ".gz" if path.suffix == ".gz" else ""
    name = path.name.removesuffix(packed)
    stem, suffix = os.path.splitext(name)
    return path.with_name(f"{stem}.rule{suffix or '.json'}{packed}")


def read_rule(layout_path: PathLike, layout: Layout) -> OrderRule | None:
    """Read the rule beside a layout's file. Return None if there is none.

    Parameters
    ----------
    layout_path : path
        File of the layout.

    Raises
    ------
    InputError
        If the rule cannot be read or belongs to another layout. The error names the rule's file.
    """
    path = rule_path(layout_path)
    if not path.exists():
        return None
    where = printable(str(path))
    rule = rule_from_document(read_document(path), where)
    try:
        rule.check_layout(layout)
    except InputError as error:
        raise InputError(f"{where}: {error.entity}", error.problem, f"{error.remedy}, or remove {where}") from error
    return rule


def rule_from_document(document: dict[str, Any], where: str = "rule") -> OrderRule:
    """Validate a parsed document as a rule."""
    return convert_format(document, OrderRule, FORMAT, where)


def rule_document(rule: OrderRule) -> dict[str, Any]:
    """Return the rule as a JSON document."""
    document: dict[str, Any] = to_document(rule, _ALWAYS_WRITTEN)
    return document


def write_rule(layout_path: PathLike, rule: OrderRule) -> Path:
    """Write a rule beside a layout's file and return its path."""
    path = rule_path(layout_path)
    write_text(path, dump(rule_document(rule)))
    return path
