"""Read and write sample metadata: JSON Lines (one object per line), Parquet (one row) or WebDataset (one member)."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from pipeloom.errors import InputError
from pipeloom.io.document import convert, parse_document, to_document
from pipeloom.io.files import MAX_FILE_BYTES, PathLike, printable, read_bytes, read_text, write_text
from pipeloom.io.webdataset import SUFFIXES, read_shard
from pipeloom.outputs import check_input
from pipeloom.spec import Sample

LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
PARQUET_SUFFIX = ".parquet"
SAMPLE_SUFFIXES = (*LINES_SUFFIXES, PARQUET_SUFFIX, *SUFFIXES)
MAX_VALUES = MAX_FILE_BYTES // 16
"""Largest number of values in a Parquet file. Runs of equal values take no space in the file."""
_ROWS = 10_000
_BATCH_BYTES = MAX_FILE_BYTES // 8
_SCAN_S = 10.0
"""Timeout of a scan, a hundred times the time for `MAX_VALUES`."""
_MAX_NAMES = 64 * MAX_FILE_BYTES
_DIVIDE = "divide it into several files"


def read_samples(path: PathLike) -> tuple[Sample, ...]:
    """Read sample metadata.

    Parameters
    ----------
    path : path
        Parquet (``.parquet``), WebDataset (``.tar``), or else JSON Lines.

    Raises
    ------
    InputError
        For example ``FILE: line 12: image_tokens[0]: ...`` (``row 12`` in Parquet): a wrong type, an impossible size, a
        repeated id or no sample. Also if pyarrow is missing for Parquet.
    """
    where = printable(str(path))
    check_input(path)
    rows: Iterable[tuple[int | str, dict[str, Any]]]
    if str(path).endswith(PARQUET_SUFFIX):
        rows, word = _parquet_rows(path, where), "row"
    elif str(path).endswith(SUFFIXES):
        rows, word = read_shard(path), "sample"
    else:
        lines = read_text(path).split("\n")
        rows = [(i, parse_document(line, f"{where}: line {i}")) for i, line in enumerate(lines, 1) if line.strip()]
        word = "line"
    samples: list[Sample] = []
    first: dict[str, int | str] = {}
    for i, row in rows:
        sample = convert(_clean(row), Sample, f"{where}: {word} {i}")
        if sample.id in first:
            problem = f"{sample.id!r} is also in {word} {first[sample.id]}"
            raise InputError(f"{where}: {word} {i}: id", problem, "ids must be unique")
        first[sample.id] = i
        samples.append(sample)
    if not samples:
        raise InputError(where, "has no sample", "give one JSON object a line")
    return tuple(samples)


def _clean(row: dict[str, Any]) -> dict[str, Any]:
    """Drop null values, also within objects: Parquet cannot omit a field in another way."""
    kept = {name: value for name, value in row.items() if value is not None}
    return {name: _clean(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _parquet_rows(path: PathLike, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(where, "needs pyarrow to be read", "pip install 'pipeloom[data]'") from error
    data = read_bytes(path)
    number = size = 0
    try:
        file = pyarrow.parquet.ParquetFile(io.BytesIO(data))
        _scan(file, where)
        # An error that ends this process does not always end pyarrow's threads.
        for batch in file.iter_batches(_rows_at_a_time(file.metadata, where), use_threads=False):
            size += batch.nbytes
            if size > MAX_FILE_BYTES:
                raise InputError(where, f"has more than {MAX_FILE_BYTES} bytes uncompressed", _DIVIDE)
            maps = [field.name for field in batch.schema if pyarrow.types.is_map(field.type)]
            for row in batch.to_pylist():
                number += 1
                yield number, row | {name: _object(row[name], f"{where}: row {number}: {name}") for name in maps}
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, TypeError) as error:
        raise InputError(where, "is not a readable Parquet file") from error


def _object(pairs: list[tuple[str, Any]] | None, where: str) -> dict[str, Any] | None:
    """Return a value of a column of maps, which pyarrow gives as pairs of key and value.

    Raise `InputError` if a key occurs twice.
    """
    found = dict(pairs or ())
    if pairs is not None and len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise InputError(where, f"has the key {twice!r} twice", "give each key once")
    return None if pairs is None else found


def _scan(file: Any, where: str) -> None:
    """Scan all pages before `_rows_at_a_time` reads the metadata of columns. A scan needs almost no memory.

    If such metadata is damaged, reading it makes pyarrow end the process. A scan raises an exception instead. Raise
    `InputError` if the scan times out, because the file has far too many values.
    """
    failures: list[Exception] = []

    def scan() -> None:
        try:
            file.scan_contents()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=scan, name="parquet", daemon=True)
    thread.start()
    thread.join(_SCAN_S)
    if thread.is_alive():
        raise InputError(where, f"has more than {MAX_VALUES} values", _DIVIDE)
    if failures:
        raise failures[0]


def _rows_at_a_time(metadata: Any, where: str) -> int:
    """Return a number of rows that always fit into `_BATCH_BYTES`.

    Raise `InputError` if the file has too many values. Equal values take almost no space in the file.
    """
    num_values, largest = 0, 1
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for j in range(group.num_columns):
            column, schema = group.column(j), metadata.schema.column(j)
            num_values += column.num_values
            # Equal values are written once, so no value is larger than its column in the file.
            size = column.total_uncompressed_size
            largest = max(largest, size)
            names = column.num_values * size if schema.physical_type == "BYTE_ARRAY" else 0
            if schema.max_repetition_level and names > _MAX_NAMES:
                raise InputError(where, f"column {column.path_in_schema!r} has too many names", _DIVIDE)
    if num_values > MAX_VALUES:
        raise InputError(where, f"has {num_values} values, more than {MAX_VALUES}", _DIVIDE)
    return max(1, min(_ROWS, _BATCH_BYTES // largest))


def write_samples(path: PathLike, samples: Iterable[Sample]) -> None:
    """Write sample metadata as JSON Lines and omit fields at their defaults."""
    rows = (to_document(sample, {Sample: ("id", "text_tokens")}) for sample in samples)
    write_text(path, "".join(msgspec.json.encode(row).decode() + "\n" for row in rows))


def batch_totals(samples: Sequence[Sample]) -> dict[str, int]:
    """Return the sums over samples that a packing balances."""
    return {
        "num_samples": len(samples),
        "text_tokens": sum(s.text_tokens for s in samples),
        "num_images": sum(len(s.image_tokens) for s in samples),
        "image_tokens": sum(sum(s.image_tokens) for s in samples),
        "image_patches": sum(sum(s.patches) for s in samples),
    }
