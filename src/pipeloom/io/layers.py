"""`pipeloom.layers/1`: reads and writes layer costs."""

from __future__ import annotations

from typing import Any

from pipeloom.cost.layers import LayerCost, LayerTable, StrategyEntry
from pipeloom.io.document import convert_format, dump, read_document, to_document
from pipeloom.io.files import PathLike, printable, write_text

FORMAT = "pipeloom.layers/1"
_ALWAYS_WRITTEN: dict[type, tuple[str, ...]] = {
    LayerTable: (
        *("format", "name", "num_ranks", "num_microbatches"),
        *("boundary_s", "boundary_bytes", "memory_capacity_bytes", "layers"),
    ),
    LayerCost: ("name", "forward_s", "activation_bytes", "parameter_bytes"),
    StrategyEntry: ("strategy", "forward_s", "activation_bytes"),
}
"""Fields that are always written. All others are omitted at their default (`docs/formats.md`)."""


def read_layers(path: PathLike) -> LayerTable:
    """Read layer costs. An `InputError` names the file, the path inside, the value and the bound."""
    return layers_from_document(read_document(path), printable(str(path)))


def layers_from_document(document: dict[str, Any], where: str = "layers") -> LayerTable:
    """Validate a parsed document as layer costs."""
    return convert_format(document, LayerTable, FORMAT, where)


def write_layers(path: PathLike, table: LayerTable) -> None:
    """Write layer costs."""
    write_text(path, dump(to_document(table, _ALWAYS_WRITTEN)))
