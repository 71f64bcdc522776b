"""`Example`: texts, images and recordings of one sample, selected by the names of its fields."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeloom.errors import InputError
from pipeloom.integrations.data.blobs import Blob
from pipeloom.integrations.data.chat import in_named_order
from pipeloom.integrations.data.sources import Source
from pipeloom.runtime.data.dataset import CorruptSampleError
from pipeloom.runtime.model.model import user_code


@dataclass(frozen=True)
class Example:
    """The contents of a sample.

    Attributes
    ----------
    messages : object or None
        A conversation, in any of the common formats.
    text : str or None
        The text to train on, if there are no messages.
    prompt : str
        The prompt before the text.
    kinds : tuple of str
        ``images`` and ``audio`` if the data have a field for them, even if this sample has none.
    """

    name: str
    images: tuple[Blob, ...] = ()
    audio: tuple[Blob, ...] = ()
    messages: Any = None
    text: str | None = None
    prompt: str = ""
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Names of the fields of an example.

    A field is a column of a table, or a file extension in a shard. Several names are separated by ``;`` and may contain
    the wildcards ``*`` and ``?``. Of ``image`` and ``audio`` all matching fields are used, in the order of their names,
    and of the others the first one.
    """

    messages: str | None = None
    """A conversation. In a shard, its format is JSON."""
    text: str | None = None
    """The text to train on, if there are no messages."""
    prompt: str | None = None
    """The prompt before the text."""
    image: str | None = None
    audio: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Fields:
        """Convert a mapping. Raise `InputError` for unknown names."""
        known = ("messages", "text", "prompt", "image", "audio")
        for name in given:
            if name not in known:
                raise InputError(f"fields[{name!r}]", "is unknown", f"choose from {', '.join(known)}")
        return cls(**given)

    def check(self, source: Source) -> Fields:
        """Return the fields, completed with the usual names.

        Raises
        ------
        InputError
            No example has a field.
        """
        there = source.fields
        if self.messages is not None and self.text is not None:
            problem = f"is set together with messages = {self.messages!r}"
            raise InputError(f"text = {self.text!r}", problem, "set one of them")
        for name, stated in vars(self).items():
            if stated is not None and not _matching(stated, there):
                remedy = f"there are {', '.join(there)}"
                raise InputError(f"{name} = {stated!r}", f"no sample of {source.title} has it", remedy)
        found = self
        if self.messages is None and self.text is None:
            found = replace(self, **_first_there({"messages": _MESSAGES, "text": _TEXTS}, there))
            if found.messages is None and found.text is None:
                remedy = f"name the field with messages or text; there are {', '.join(there)}"
                raise InputError("messages", f"no sample of {source.title} has any by a usual name", remedy)
        if self.image is None and _matching(_IMAGES, there):
            found = replace(found, image=_IMAGES)
        if self.audio is None and _matching(_SOUNDS, there):
            found = replace(found, audio=_SOUNDS)
        return found


_MESSAGES, _TEXTS = ("messages", "conversations", "messages.json", "json"), ("text", "txt", "caption")
_TOOLS = "tools;tools.json"
_SOUNDS = "audio;wav;*.wav"
_IMAGES = "image;images;jpg;jpeg;png;webp;*.jpg;*.jpeg;*.png;*.webp"


def _first_there(usual: Mapping[str, Sequence[str]], there: Sequence[str]) -> dict[str, str]:
    for field, names in usual.items():
        for name in names:
            if name in there:
                return {field: name}
    return {}


def _matching(stated: str, there: Sequence[str]) -> list[str]:
    patterns = [pattern.strip() for pattern in stated.split(";")]
    found = [name for name in there if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    return sorted(found, key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts 10 after 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def read_example(source: Source, i: int, fields: Fields, function: Callable[[Any], Any] | None) -> Example:
    """Read the texts of an example; its images and recordings are named, and not read.

    Raises
    ------
    CorruptSampleError
        A named field is missing, or is not what it is said to be.
    """
    name = source.name(i)
    row: Mapping[str, Any] = source[i]
    if function is not None:
        with user_code(f"{name}: function"):
            row = function(row)
        if not isinstance(row, Mapping):
            raise InputError("function", f"returned a {type(row).__name__}", "return a dictionary of fields")
        fields = Fields(**{each: each for each in vars(fields) if each in row})
    messages = None if fields.messages is None else _json(_one(row, fields.messages, name, "messages"), name)
    tools = _matching(_TOOLS, list(row))
    if tools and messages is not None:
        given = messages if isinstance(messages, Mapping) else {"messages": messages}
        messages = {**given, "tools": given.get("tools") or _json(row[tools[0]], name)}
    images = in_named_order(_media(row, fields.image, name), messages, "image")
    audio = in_named_order(_media(row, fields.audio, name), messages, "audio")
    text = None if fields.text is None else _text(_one(row, fields.text, name, "text"), name)
    prompt = "" if fields.prompt is None else _text(_one(row, fields.prompt, name, "prompt"), name)
    named = {"images": fields.image, "audio": fields.audio}
    kinds = tuple(kind for kind, field in named.items() if field is not None)
    return Example(name, images, audio, messages, text, prompt, kinds)


def _one(row: Mapping[str, Any], stated: str, name: str, what: str) -> Any:
    found = _matching(stated, list(row))
    if found and row[found[0]] is None:
        raise CorruptSampleError(name, f"has nothing in {found[0]!r} ({what})", "repair it")
    if not found:
        raise CorruptSampleError(name, f"has no {stated!r} ({what}), but {', '.join(row)}", "repair it")
    return row[found[0]]


def _media(row: Mapping[str, Any], stated: str | None, name: str) -> tuple[Blob, ...]:
    found: list[Blob] = []
    for field in [] if stated is None else _matching(stated, list(row)):
        value = row[field]
        for each in [] if value is None else value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, bytes):
                each = Blob(f"{name}.{field}", data=each)
            if not isinstance(each, Blob):
                raise InputError(f"{name}.{field}", f"is a {type(each).__name__}", "give a field with bytes")
            found.append(each)
    return tuple(found)


def _text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Blob):
        try:
            return value.read().decode()
        except UnicodeDecodeError as error:
            raise CorruptSampleError(value.name, f"is not UTF-8 text (byte {error.start})", "repair it") from error
    raise InputError(name, f"has a {type(value).__name__} for a text", "name a field with text")


def _json(value: Any, name: str) -> Any:
    if not isinstance(value, (str, Blob)):
        return value
    text = _text(value, name)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise CorruptSampleError(name, "has messages in too many brackets", "repair it") from error
    except ValueError as error:
        raise CorruptSampleError(name, f"has messages that are no JSON ({error})", "repair it") from error
