"""JSON documents: strict parsing, conversion to and from structs with errors that name path and value, and layout."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from pipeloom.conversion import UPGRADE
from pipeloom.conversion import convert as convert
from pipeloom.conversion import show as show
from pipeloom.errors import InputError
from pipeloom.io.files import PathLike, printable, read_text
from pipeloom.taskgraph import MAX_S, MAX_TOTAL, NS_PER_S, IntArray

T = TypeVar("T")

_LINE = 110
"""Values with shorter text stay on one line of a file."""
_TWICE = "\0twice"
_SUSPECT = re.compile(r"NaN|Infinity|\\u|[eE]\+?0*[1-9]\d{2}|\d{19}")
"""Text that the standard parser accepts and no format allows contains one of these."""


def read_document(path: PathLike) -> dict[str, Any]:
    """Read one JSON object from a file.

    Raise `InputError` if the file is not valid JSON, is truncated, repeats a key, nests too deeply, or has a number
    that is not finite or text that is not Unicode. The error names the file and, if possible, the path inside it.
    """
    return parse_document(read_text(path), printable(str(path)))


def parse_document(text: str, where: str) -> dict[str, Any]:
    """Parse the text of one JSON object. Errors are those of `read_document`, with ``where`` as the file's name."""
    repeated: list[str] = []

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            found[_TWICE] = next(name for i, name in enumerate(names) if name in names[:i])
            repeated.append(found[_TWICE])
        return found

    try:
        document = json.loads(text, object_pairs_hook=members)
        # The second pass is slow, so it runs only if the text gives a reason.
        defect = next(_defects(document, ""), None) if repeated or _SUSPECT.search(text) else None
    except json.JSONDecodeError as error:
        if not text.strip():
            raise InputError(where, "is empty") from error
        place = f"line {error.lineno}, column {error.colno}"
        raise InputError(where, f"is not valid JSON: {error.msg.lower()} ({place})") from error
    except RecursionError as error:
        raise InputError(where, "is nested too deeply to be one of the formats") from error
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(where, "has a number with too many digits") from error
    if defect is not None:
        path, problem = defect
        raise InputError(f"{where}: {printable(path)}" if path else where, problem)
    if not isinstance(document, dict):
        kinds = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
        raise InputError(where, f"is {kinds.get(type(document), 'a number')}, not a JSON object")
    return document


def _defects(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield path and problem of every value that JSON text may have but no format allows."""
    if isinstance(node, dict):
        if _TWICE in node:
            yield f"{path}.{node[_TWICE]}".lstrip("."), "is given twice in one object"
        for key, value in node.items():
            yield from _defects(key, path)
            yield from _defects(value, f"{path}.{key}".lstrip("."))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _defects(value, f"{path}[{i}]")
    elif isinstance(node, int) and abs(node) >= 2**63:
        yield path, f"{show(node)} does not fit in 64 bits"
    elif isinstance(node, float) and not math.isfinite(node):
        yield path, f"{node} is not a finite number"
    elif isinstance(node, str):
        try:
            node.encode("utf-8")
        except UnicodeEncodeError:
            yield path, "has a lone surrogate, which is not valid Unicode"


def convert_format(document: dict[str, Any], kind: type[T], expected: str, where: str) -> T:
    """Check the format and version of a document, then validate it as ``kind``, see `convert`."""
    found = document.get("format")
    if found is None:
        raise InputError(f"{where}: format", "is missing", f'begin the file with "format": "{expected}"')
    if found != expected:
        other_version = str(found).rpartition("/")[0] == expected.rpartition("/")[0]
        raise InputError(f"{where}: format", f"{show(found)} is not {expected!r}", UPGRADE if other_version else "")
    return convert(document, kind, where)


def to_document(value: Any, always: Mapping[type, tuple[str, ...]]) -> Any:
    """Convert structs to a JSON document that older readers accept, see `docs/formats.md`.

    ``always`` has, for every struct type, the fields that are always written, in this order: those of version 1 of the
    format. Fields that were added later follow, and each is omitted at its default. Fields may be structs, or lists of
    structs.
    """
    if isinstance(value, tuple | list) and value and isinstance(value[0], msgspec.Struct):
        return type(value)(to_document(item, always) for item in value)
    if type(value) not in always:
        return msgspec.to_builtins(value)
    names = always[type(value)]
    later = [f.name for f in msgspec.structs.fields(value) if f.name not in names and not _is_default(f, value)]
    return {name: to_document(getattr(value, name), always) for name in (*names, *later)}


def _is_default(field: msgspec.structs.FieldInfo, value: msgspec.Struct) -> bool:
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return bool(getattr(value, field.name) == default)


def times_ns(seconds: Sequence[float]) -> IntArray:
    """Convert `Seconds` to integer nanoseconds, ``rint(s * 1e9)``: to the nearest, halves to even."""
    return np.rint(np.asarray(seconds, dtype=np.float64) * float(NS_PER_S)).astype(np.int64)


def time_ns(seconds: float) -> int:
    """Convert one time to integer nanoseconds, rounded as in `times_ns`."""
    return round(seconds * NS_PER_S)


def summed_times_ns(path: str, seconds: Sequence[float]) -> IntArray:
    """Convert times as `times_ns` does. Raise `InputError` if they sum to `MAX_S` (146 years) or more."""
    if (total := float(np.sum(seconds))) >= MAX_S:
        raise InputError(path, f"sums to {total:g} s, which is not below {MAX_S:g} s")
    return times_ns(seconds)


def summed_sizes(path: str, values: Sequence[int]) -> IntArray:
    """Return sizes in bytes as an array. Raise `InputError` if they sum to 2**62 or more."""
    if (total := sum(values)) >= MAX_TOTAL:
        raise InputError(path, f"sums to {show(total)}, which is not below 2**62")
    return int_array(values)


def int_array(values: Sequence[int]) -> IntArray:
    """Return integers of a file as an array."""
    return np.asarray(values, dtype=np.int64)


def seconds(nanoseconds: IntArray | Sequence[int]) -> list[float]:
    """Convert nanoseconds to seconds for a file. Times below 2**51 ns (26 days) survive a write and a read exactly."""
    return [int(ns) / NS_PER_S for ns in nanoseconds]


def dump(document: Any) -> str:
    """Return JSON text with one line for each field of the document and of its objects, and a final newline."""
    return _dump(document, 2, "") + "\n"


def _dump(node: Any, depth: int, indent: str) -> str:
    compact = json.dumps(node, ensure_ascii=False, allow_nan=False)
    if depth == 0 or len(compact) <= _LINE or not isinstance(node, dict | list):
        return compact
    inner = indent + " "
    if isinstance(node, dict):
        parts = [f"{json.dumps(key)}: {_dump(value, depth - 1, inner)}" for key, value in node.items()]
        return "{" + f",\n{inner}".join(parts) + "}"
    if not any(isinstance(value, dict | list) for value in node):
        return compact
    return "[" + f",\n{inner}".join(_dump(value, depth - 1, inner) for value in node) + "]"
