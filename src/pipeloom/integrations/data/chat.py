"""Conversations: convert common formats of messages to messages with typed parts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeloom.integrations.data.blobs import Blob
from pipeloom.runtime.data.dataset import CorruptSampleError

_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ("user", "assistant", "system", "tool")}
_MEDIA = ("image", "audio")
_FIELDS = ("role", "from", "content", "value")

Message = dict[str, Any]


def conversation(given: Any, where: str, counts: Mapping[str, int]) -> list[Message]:
    """Return messages with roles and typed parts. Raise `CorruptSampleError` if the data are no such messages.

    Messages may have ``role`` and ``content``, or ``from`` and ``value``. In texts, ``<image>`` and ``<audio>`` are
    placeholders. Without placeholders, images and recordings go before the first user message. ``counts`` has the
    number of images and recordings of the sample. If the data have no field for a kind, it is not in the mapping, and
    its placeholder is ordinary text.
    """
    given = _list(given)
    if not given:
        raise CorruptSampleError(where, "is not a list of messages", 'give [{"role": ..., "content": ...}, ...]')
    messages = [_message(each, f"{where}[{i}]", counts) for i, each in enumerate(given)]
    # Images go before recordings.
    for kind in reversed(_MEDIA):
        places = sum(part["type"] == kind for m in messages for part in parts(m))
        if places == counts.get(kind, 0):
            continue
        first = next((m for m in messages if m["role"] == "user"), None)
        if places or first is None:
            have = counts.get(kind, 0)
            raise CorruptSampleError(
                where, f"has {places} places for {have} of {kind}", f"give as many, or name none by <{kind}>"
            )
        first["content"] = [*({"type": kind} for _ in range(counts[kind])), *parts(first)]
    return messages


def in_named_order(contents: Sequence[Blob], given: Any, kind: str) -> tuple[Blob, ...]:
    """Return images or recordings in the order in which parts of messages of this kind name them.

    A part names a file of the sample by its name in the shard, its field, or its name in the table. The order stays
    unless every place in the messages, which may be invalid, names another file of the sample: names may be those of an
    original data set.
    """
    order: list[int] = []
    for name in _names(given, kind) if len(contents) > 1 else ():
        fits = [_fit(blob, name) for blob in contents]
        best = max(fits, default=0.0)
        place = fits.index(best) if best else -1
        if not best or fits.count(best) > 1 or place in order:
            return tuple(contents)
        order.append(place)
    order += [i for i in range(len(contents)) if i not in order]
    return tuple(contents[i] for i in order)


def _names(given: Any, kind: str) -> list[str]:
    """Return the name of a file at each place of a type; empty for marks in texts, and for parts without a name."""
    found = []
    for message in _list(given):
        content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
        for part in content if isinstance(content, (list, tuple)) else (content,):
            if isinstance(part, str):
                found += [""] * part.count(f"<{kind}>")
            elif isinstance(part, Mapping) and part.get("type") == kind:
                values = [part.get(key) for key in (kind, "path", "url")]
                found.append(next((value for value in values if isinstance(value, str)), ""))
    return found


def _fit(blob: Blob, name: str) -> float:
    """Return how well a name in a message fits a file; 0 if it is that of another one."""
    named = name.lower().split("/")[::-1]
    if not named[0]:
        return 0
    # In a shard, the name ends with the file, whose field follows the first dot. A table has the original path.
    paths = [blob.name, *([] if blob.path is None else [blob.path.as_posix()])]
    fits: list[float] = []
    for path in paths:
        parts = path.lower().split("/")[::-1]
        most = min(len(named), len(parts))
        fits.append(next((i for i in range(most) if named[i] != parts[i]), most))
    is_field = [paths[0].lower().rpartition("/")[2].partition(".")[2]] == named
    return max(fits) or 0.5 * is_field


def tools_of(given: Any) -> Any:
    """Return the tool descriptions of a conversation, or None."""
    return given.get("tools") or None if isinstance(given, Mapping) else None


def check_words(messages: Sequence[Message], tokens: Mapping[str, str], where: str) -> None:
    """Raise `CorruptSampleError` for texts that contain placeholder tokens, whose kinds of content ``tokens`` has."""
    for number, message in enumerate(messages):
        for text in (part["text"] for part in parts(message) if part["type"] == "text"):
            for token, kind in tokens.items():
                if token in text:
                    raise CorruptSampleError(
                        f"{where}: messages[{number}].content",
                        f"has the processor's token for {kind}, {token!r}, at character {text.index(token)}",
                        "change the text; the placeholders are <image> and <audio>",
                    )


def with_contents(messages: Sequence[Message], contents: Mapping[str, Sequence[Any]]) -> list[Message]:
    """Return messages with images and recordings in their parts, as the library's processors take them."""
    left = {kind: iter(each) for kind, each in contents.items()}

    def filled(part: dict[str, Any]) -> dict[str, Any]:
        kind = part["type"]
        return {**part, kind: next(left[kind])} if kind in left else part

    return [{**m, "content": [*map(filled, parts(m))]} if isinstance(m.get("content"), list) else m for m in messages]


def parts(message: Message) -> list[dict[str, Any]]:
    """Return the typed parts of a message. A message that only calls tools has none."""
    found: list[dict[str, Any]] = message.get("content", [])
    return found


def _list(given: Any) -> Sequence[Any]:
    """Return the messages of a conversation; empty if it has none."""
    if isinstance(given, Mapping):
        given = given.get("messages", given.get("conversations"))
    return given if isinstance(given, Sequence) and not isinstance(given, str) else ()


def _message(given: Any, where: str, counts: Mapping[str, int]) -> Message:
    if not isinstance(given, Mapping):
        raise CorruptSampleError(where, f"is a {type(given).__name__}", "give an object with role and content")
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if role not in _ROLES:
        raise CorruptSampleError(f"{where}.role", f"{role!r} is none of {', '.join(_ROLES)}")
    # Templates also read other fields, such as tool calls and reasoning.
    message = {name: value for name, value in given.items() if name not in _FIELDS and value is not None}
    message["role"] = _ROLES[role]
    if isinstance(content, str):
        message["content"] = _split(content, counts)
    elif isinstance(content, Sequence):
        message["content"] = [_part(each, f"{where}.content[{i}]") for i, each in enumerate(content)]
    elif content is not None or not message.get("tool_calls"):
        raise CorruptSampleError(f"{where}.content", f"is a {type(content).__name__}", "give text, or a list of parts")
    return message


def _split(text: str, counts: Mapping[str, int]) -> list[dict[str, Any]]:
    marks = {f"<{kind}>": kind for kind in counts}
    if not any(mark in text for mark in marks):
        return [{"type": "text", "text": text}]
    pieces = re.split("(" + "|".join(marks) + ")", text)
    return [{"type": marks[each]} if each in marks else {"type": "text", "text": each} for each in pieces if each]


def _part(given: Any, where: str) -> dict[str, Any]:
    if isinstance(given, str):
        return {"type": "text", "text": given}
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text" and isinstance(given.get("text"), str):
        return {"type": "text", "text": given["text"]}
    if kind in _MEDIA:
        return {"type": kind}
    raise CorruptSampleError(where, f"is of type {kind!r}", "give text, image or audio")
