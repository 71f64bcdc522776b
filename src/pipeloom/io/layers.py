"""`pipeloom.layers/1`: layer costs, to and from `LayerTable`."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeloom.cost.layers import LayerTable
from pipeloom.io.document import check_format, convert, dump, read_document
from pipeloom.io.files import PathLike, printable, write_text

FORMAT = "pipeloom.layers/1"


def read_layers(path: PathLike) -> LayerTable:
    """Read layer costs; an `InputError` names file, path, value and bound."""
    return layers_from_document(read_document(path), printable(str(path)))


def layers_from_document(document: dict[str, Any], where: str = "layers") -> LayerTable:
    """Validate a parsed document as layer costs."""
    check_format(document, FORMAT, where)
    return convert(document, LayerTable, where)


def layers_document(table: LayerTable) -> dict[str, Any]:
    """Layer costs as a JSON document."""
    fields: dict[str, Any] = msgspec.to_builtins(table)
    order = (
        "format",
        "name",
        "num_ranks",
        "num_microbatches",
        "boundary_s",
        "boundary_bytes",
        "memory_capacity_bytes",
        "layers",
    )
    return {name: fields[name] for name in order}


def write_layers(path: PathLike, table: LayerTable) -> None:
    """Write layer costs, one layer a line."""
    write_text(path, dump(layers_document(table)))
