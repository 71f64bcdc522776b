"""Typed conversion of parsed documents. Errors name path, value and bound."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from pipeloom.bounds import (
    Budget,
    Count,
    Factor,
    Latency,
    Magnitude,
    Microbatches,
    Number,
    NumBytes,
    Rate,
    RateOrNone,
    Ratio,
    Seconds,
    Share,
    Wait,
)
from pipeloom.errors import (
    InputError,
    check_count,
    check_limit,
    check_not_negative,
    check_positive,
    check_ratio,
    check_share,
    printable_line,
)
from pipeloom.limits import MAX_TOTAL

T = TypeVar("T")

UPGRADE = "upgrade Pipeloom if a newer version wrote the file"
"""What to do about an unknown field or version of an exchange format."""
_JSON_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_KINDS = {int: "int", float: "float", str: "str", bool: "bool", list: "array", dict: "object", type(None): "null"}
_BOUND = re.compile(r"Expected `(?:int|float|array)`( of length)? (>=|<=|>|<) (\S+)")
_OUTSIDE = {
    ">=": (operator.lt, "below"),
    "<=": (operator.gt, "above"),
    ">": (operator.le, "not above"),
    "<": (operator.ge, "not below"),
}


def convert(document: Any, kind: type[T], where: str, *, strict: bool = True) -> T:
    """Validate a parsed document against a msgspec type. Errors name file, path, value and expectation.

    If not ``strict``, numbers may be written as text.
    """
    try:
        return msgspec.convert(document, kind, strict=strict)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`").lstrip(".")
        if isinstance(error.__cause__, InputError):
            cause = error.__cause__
            entity = cause.entity
            if path and not entity.startswith(path):
                joint = "." if re.match(r"[a-z_]+(\[|\.|$)", entity) else ": "
                entity = f"{path}{joint}{entity}"
            raise InputError(f"{where}: {entity}", cause.problem, cause.remedy) from error
        raise _explain(message, path, document, kind, where) from error


def _explain(message: str, path: str, document: Any, kind: type, where: str) -> InputError:
    """Convert msgspec's message to an error with the value at the path and the expected value."""
    if found := re.fullmatch(r"Object contains unknown field `(.*)`", message, re.DOTALL):
        field = found[1]
        close = get_close_matches(field, _known_fields(kind), n=1)
        entity = f"{_first_at(document, path, lambda value: field in value)[0]}.{field}".lstrip(".")
        remedy = f"did you mean {close[0]}?" if close else "remove it"
        if isinstance(document, dict) and str(document.get("format")).startswith("pipeloom."):
            remedy = f"{remedy} Or {UPGRADE}" if close else f"{UPGRADE}, otherwise {remedy}"
        return InputError(f"{where}: {printable_line(entity)}", "is not a known field", remedy)
    if found := re.fullmatch(r"Object missing required field `(.*)`", message):
        field = found[1]
        entity = f"{_first_at(document, path, lambda value: field not in value)[0]}.{field}".lstrip(".")
        return InputError(f"{where}: {printable_line(entity)}", "is missing")
    if found := _BOUND.match(message):
        return _outside(document, path, found, where)
    place, value = _first_at(document, path, lambda value: _is_meant(message, value))
    entity = f"{where}: {printable_line(place)}" if place else where
    if found := re.match(r"Expected `([^`]*)`(?:, got|$)", message):
        expected = " or ".join(_JSON_NAMES.get(name, name) for name in found[1].split(" | "))
        return InputError(entity, f"{show(value)} is not {expected}")
    if message.startswith("Invalid enum value"):
        return InputError(entity, f"{show(value)} is not one of {', '.join(_words_at(kind, path))}")
    return InputError(entity, f"{show(value)}: {message[:1].lower()}{message[1:]}")


def _is_meant(message: str, value: Any) -> bool:
    """Return whether a message is about this value, by the type or the word that it names."""
    if found := re.search(r", got `(\w+)`$", message):
        return found[1] == _KINDS.get(type(value), found[1])
    return not message.startswith("Invalid enum value") or message.endswith(f" {value!r}")


def _outside(document: Any, path: str, found: re.Match[str], where: str) -> InputError:
    """Make an error with the number or list that is outside its bound, and the bound."""
    of_length, sign, text = found.groups()
    outside, word = _OUTSIDE[sign]
    bound = float(text) if "." in text or "e" in text else int(text)
    entity, shown = path, ""
    for place, value in _all_at(document, path):
        # Numbers may be text if the conversion is not strict.
        number = len(value) if of_length else float(value) if isinstance(value, str) else value
        if outside(number, bound) or number != number:
            entity, shown = place, f"has {number} entries, which" if of_length else _short(value)
            if isinstance(number, float) and not math.isfinite(number):
                return InputError(f"{where}: {printable_line(entity)}", f"{value} is not finite")
            break
    if of_length:
        limit = f"{word} {text}"
    elif bound == 0:
        limit = {"below": "negative", "not above": "not positive"}[word]
    elif bound == MAX_TOTAL - 1:
        limit = "not below 2**62"
    else:
        limit = f"{word} {_short(bound)}" + (" s" if re.search(r"_s(\[\d+\])*$", entity) else "")
    return InputError(f"{where}: {printable_line(entity)}", f"{shown} is {limit}")


def _short(number: float | str) -> str:
    if isinstance(number, str):
        return printable_line(number)
    return f"{number:g}" if isinstance(number, float) else show(number)


def _all_at(document: Any, path: str) -> list[tuple[str, Any]]:
    """Return all values at a path with their own paths; ``[...]`` matches any key of an object."""
    found = [("", document)]
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        objects = [(at, node) for at, node in found if isinstance(node, dict)]
        if index == "...":
            found = [(f"{at}.{key}".lstrip("."), value) for at, node in objects for key, value in node.items()]
        elif index:
            lists = ((at, node) for at, node in found if isinstance(node, (list, tuple)))
            found = [(f"{at}[{index}]", node[int(index)]) for at, node in lists if int(index) < len(node)]
        else:
            found = [(f"{at}.{name}".lstrip("."), node[name]) for at, node in objects if name in node]
    return found


def _first_at(document: Any, path: str, is_meant: Callable[[Any], bool]) -> tuple[str, Any]:
    """Return the first value at a path that is meant, with its own path."""
    return next(((at, value) for at, value in _all_at(document, path) if is_meant(value)), (path, None))


def _known_fields(kind: type) -> set[str]:
    """Return all field names of a struct type at any depth, for hints."""
    names: set[str] = set()
    todo: list[Any] = [msgspec.inspect.type_info(kind)]
    while todo:
        info = todo.pop()
        if isinstance(info, msgspec.inspect.StructType):
            for field in info.fields:
                if field.encode_name not in names:
                    names.add(field.encode_name)
                    todo.append(field.type)
        todo.extend(getattr(info, "types", ()))
        todo.extend(getattr(info, each) for each in ("item_type", "value_type") if hasattr(info, each))
        if isinstance(item := getattr(info, "item_types", None), tuple):
            todo.extend(item)
    return names


def _words_at(kind: type, path: str) -> list[str]:
    """Return the strings that a type allows at a path."""
    infos: list[Any] = [msgspec.inspect.type_info(kind)]
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        found: list[Any] = []
        for info in (each for one in infos for each in (one, *getattr(one, "types", ()))):
            if index == "...":
                found += [info.value_type] if hasattr(info, "value_type") else ()
            elif index:
                found += [info.item_type] if hasattr(info, "item_type") else getattr(info, "item_types", ())
            elif isinstance(info, msgspec.inspect.StructType):
                found += [field.type for field in info.fields if field.encode_name == name]
        infos = found
    every = (each for one in infos for each in (one, *getattr(one, "types", ())))
    return [repr(word) for each in every for word in getattr(each, "values", ())]


def show(value: Any) -> str:
    """Return a short form of a JSON value, for messages."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return "an integer of more than 20 digits"
    # Parquet has values that JSON does not support.
    text = json.dumps(value, ensure_ascii=False, default=repr) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:50]}..."


_CHECKS: dict[Callable[[str, Any], None], tuple[Any, ...]] = {
    check_count: (Count, Microbatches),
    check_not_negative: (Number, NumBytes, Magnitude, Seconds, Latency, RateOrNone),
    check_positive: (Factor, Wait, Rate),
    check_share: (Share,),
    check_ratio: (Ratio,),
    check_limit: (Budget,),
}


def check_fields(struct: Any, table: str = "") -> None:
    """Raise `InputError` for the first number of a struct that is outside of the bounds of its type.

    msgspec checks only what it reads from a file. ``table`` is the struct's name in the error; if it is empty, the
    error names only the field.
    """
    for name, check, several, optional in _checks(struct.__class__):
        value, entity = getattr(struct, name), f"{table}.{name}".lstrip(".")
        if value is None and optional:
            continue
        if value is None:
            raise InputError(entity, "is None", "give a value")
        for i, each in enumerate(value) if several else ((None, value),):
            check(entity if i is None else f"{entity}[{i}]", each)


@lru_cache
def _checks(kind: type) -> tuple[tuple[str, Callable[[str, Any], None], bool, bool], ...]:
    """Return name and check of each bounded field, whether it is a tuple of numbers, and whether it may be None."""
    found = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        optional = NoneType in get_args(hint)
        if optional:
            hint = next(each for each in get_args(hint) if each is not NoneType)
        several = get_origin(hint) is tuple
        alias = get_args(hint)[0] if several else hint
        found += [(name, check, several, optional) for check, bounded in _CHECKS.items() if alias in bounded]
    return tuple(found)
