"""JSON documents: strict reading, typed conversion whose errors name path and value, and tidy writing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipeloom.conversion import convert as convert
from pipeloom.conversion import show as show
from pipeloom.errors import InputError
from pipeloom.io.files import PathLike, printable, read_text
from pipeloom.taskgraph import MAX_S, MAX_TOTAL, NS_PER_S, IntArray

_LINE = 110  # what is shorter stands on one line of a file

_MAY_OVERFLOW = re.compile(r"[eE]\+?0*[1-9]\d{2}|\d{19}")


def read_document(path: PathLike) -> dict[str, Any]:
    """Read one JSON object from a file.

    Raises
    ------
    InputError
        With the file and, where there is one, the path inside: no JSON, cut short, a key given twice, a
        number that is not finite, text that is not Unicode, nesting without end.
    """
    return parse_document(read_text(path), printable(str(path)))


def parse_document(text: str, where: str) -> dict[str, Any]:
    """Parse the text of one JSON object; ``where`` names it in errors, which are those of `read_document`."""
    try:
        document = _parse(text, where)
    except json.JSONDecodeError as error:
        if not text.strip():
            raise InputError(where, "is empty") from error
        place = f"line {error.lineno}, column {error.colno}"
        raise InputError(where, f"is not valid JSON: {error.msg.lower()} ({place})") from error
    except RecursionError as error:
        raise InputError(where, "is nested too deeply to be one of the formats") from error
    except InputError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(where, "has a number with too many digits") from error
    if not isinstance(document, dict):
        raise InputError(where, f"is {_json_kind(document)}, not a JSON object")
    return document


def _parse(text: str, where: str) -> Any:
    """Standard JSON, then what the standard parser lets through; the second look costs only where it may."""
    suspect: list[str] = []

    def unite(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            names = [name for name, _ in pairs]
            members[_TWICE] = next(name for i, name in enumerate(names) if name in names[:i])
            suspect.append("key")
        return members

    def constant(name: str) -> float:
        suspect.append(name)
        return float(name.replace("Infinity", "inf"))

    document = json.loads(text, object_pairs_hook=unite, parse_constant=constant)
    if suspect or "\\u" in text or _MAY_OVERFLOW.search(text):
        for path, problem in _defects(document, ""):
            raise InputError(f"{where}: {printable(path)}" if path else where, problem)
    return document


_TWICE = "\0twice"


def _defects(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """Everything that JSON text may say but no format allows, with its path."""
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
            yield path, "has a lone surrogate, which is no text"


def check_format(document: dict[str, Any], expected: str, where: str) -> None:
    """Refuse a document of another format or version."""
    found = document.get("format")
    if found is None:
        raise InputError(f"{where}: format", "is missing", f'begin the file with "format": "{expected}"')
    if found != expected:
        raise InputError(f"{where}: format", f"{show(found)} is not {expected!r}")


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    return {list: "a list", str: "a string", bool: "true or false"}.get(type(value), "a number")


def times_ns(path: str, seconds: Sequence[float], *, summed: bool = True) -> IntArray:
    """Seconds to integer nanoseconds, ``rint(s * 1e9)``: to the nearest, halves to even. Done once, here.

    Raises
    ------
    InputError
        Naming the entry: it is negative, not finite, or the sum passes `MAX_TOTAL` nanoseconds (146 years).
    """
    values = np.asarray(seconds, dtype=np.float64)
    bad = np.flatnonzero(~((values >= 0) & (values < MAX_S)))
    if bad.size:
        raise _bad_time(f"{path}[{bad[0]}]", float(values[bad[0]]))
    if summed and float(values.sum()) >= MAX_S:
        raise InputError(path, f"sums to {values.sum():g} s, which is not below {MAX_S:g} s")
    return np.rint(values * float(NS_PER_S)).astype(np.int64)


def time_ns(path: str, seconds: float) -> int:
    """One time in integer nanoseconds, rounded as in `times_ns`."""
    if not 0 <= seconds < MAX_S:
        raise _bad_time(path, seconds)
    return round(seconds * NS_PER_S)


def _bad_time(path: str, value: float) -> InputError:
    if not math.isfinite(value):
        return InputError(path, f"{value} is not finite")
    return InputError(path, f"{value:g} is negative" if value < 0 else f"{value:g} is not below {MAX_S:g} s")


def counts(path: str, values: Sequence[int], *, summed: bool = False) -> IntArray:
    """Integers from 0 to below 2**62 as an array; with ``summed`` their sum stays below it too."""
    for i, value in enumerate(values):
        if value < 0 or value >= MAX_TOTAL:
            raise _out_of_range(f"{path}[{i}]", value)
    if summed and sum(values) >= MAX_TOTAL:
        raise InputError(path, f"sums to {show(sum(values))}, which is not below 2**62")
    return np.asarray(values, dtype=np.int64)


def count(path: str, value: int) -> int:
    """One integer from 0 to below 2**62."""
    if value < 0 or value >= MAX_TOTAL:
        raise _out_of_range(path, value)
    return value


def _out_of_range(path: str, value: int) -> InputError:
    return InputError(path, f"{show(value)} {'is negative' if value < 0 else 'is not below 2**62'}")


def seconds(nanoseconds: IntArray | Sequence[int]) -> list[float]:
    """Nanoseconds as seconds for a file; reading them back gives the same integers below 2**51 ns (26 days)."""
    return [int(ns) / NS_PER_S for ns in nanoseconds]


def locate(error: InputError, where: str) -> InputError:
    """The same error with the file's name before its path."""
    return InputError(f"{where}: {error.entity}", error.problem, error.remedy)


def dump(document: Any, depth: int = 2) -> str:
    """JSON text with one field a line down to ``depth``, long columns on one line, and a final newline."""
    return _dump(document, depth, "") + "\n"


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
