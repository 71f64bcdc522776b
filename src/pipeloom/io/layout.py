"""`pipeloom.layout/1`, and with streams `pipeloom.layout/2`: reads and writes layouts."""

from __future__ import annotations

from typing import Any

from pipeloom.errors import InputError
from pipeloom.io.document import convert_format, dump, read_document
from pipeloom.io.files import PathLike, printable, write_text
from pipeloom.spec import Layout

FORMAT = "pipeloom.layout/1"
FORMAT_WITH_STREAMS = "pipeloom.layout/2"


def read_layout(path: PathLike) -> Layout:
    """Read a layout.

    Parameters
    ----------
    path : path
        A ``pipeloom.layout/1`` or ``/2``.

    Raises
    ------
    InputError
        One line with the file, the path inside, the value and the bound.
    """
    return layout_from_document(read_document(path), printable(str(path)))


def layout_from_document(document: dict[str, Any], where: str = "layout") -> Layout:
    """Validate a parsed document as a layout."""
    with_streams = document.get("format") == FORMAT_WITH_STREAMS
    layout = convert_format(document, Layout, FORMAT_WITH_STREAMS if with_streams else FORMAT, where)
    if layout.has_streams and not with_streams:
        raise InputError(f"{where}: format", f"{FORMAT!r} has no streams", f'write "format": "{FORMAT_WITH_STREAMS}"')
    return layout


def layout_document(layout: Layout) -> dict[str, Any]:
    """Return the layout as a JSON document, see `Layout.document`."""
    fields = layout.document
    head = {name: fields[name] for name in ("format", "num_ranks", "parallelism")}
    return head | {name: fields[name] for name in ("modules", "chunks")}


def write_layout(path: PathLike, layout: Layout) -> None:
    """Write a layout.

    Parameters
    ----------
    path : path
        A name that ends in ``.gz`` is compressed.
    layout : Layout
        Version 1 of the format, or version 2 if there are streams.
    """
    write_text(path, dump(layout_document(layout)))
