"""`pipeloom.rule/1`: the priority rule that was found with a layout, in a file beside the layout's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from pipeloom.errors import InputError
from pipeloom.io.document import check_format, convert, dump, read_document
from pipeloom.io.files import PathLike, printable, write_text
from pipeloom.search.rule import OrderRule
from pipeloom.spec import Layout

FORMAT = "pipeloom.rule/1"


def rule_path(layout_path: PathLike) -> Path:
    """Name of the file beside a layout's: ``layout.json`` has its rule in ``layout.rule.json``."""
    path = Path(layout_path)
    packed = ".gz" if path.suffix == ".gz" else ""
    name = path.name.removesuffix(packed)
    stem, suffix = os.path.splitext(name)
    return path.with_name(f"{stem}.rule{suffix or '.json'}{packed}")


def read_rule(layout_path: PathLike, layout: Layout) -> OrderRule | None:
    """Read the rule beside a layout's file; None where there is none.

    Parameters
    ----------
    layout_path : path
        Of the layout, a ``pipeloom.layout/1``.
    layout : Layout
        As it was read.

    Raises
    ------
    InputError
        Naming the rule's file: it cannot be read, or is of another layout.
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
    check_format(document, FORMAT, where)
    return convert(document, OrderRule, where)


def rule_document(rule: OrderRule) -> dict[str, Any]:
    """The rule as a JSON document, defaults written out."""
    fields: dict[str, Any] = msgspec.to_builtins(rule)
    return {name: fields[name] for name in ("format", "period", "chunks")}


def write_rule(layout_path: PathLike, rule: OrderRule) -> Path:
    """Write a rule beside a layout's file, one chunk a line; return where."""
    path = rule_path(layout_path)
    write_text(path, dump(rule_document(rule)))
    return path
