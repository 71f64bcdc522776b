"""Conversations: common forms of messages as messages with typed parts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeloom.runtime.data.dataset import CorruptSampleError

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
_MEDIA = ("image", "audio")
_FIELDS = ("role", "from", "content", "value")

Message = dict[str, Any]


def conversation(given: Any, where: str, counts: Mapping[str, int]) -> list[Message]:
    """Messages with roles and typed parts; images that no message places stand before the first words of the user.

    Both common forms are known: ``role`` and ``content``, and ``from`` and ``value``. In a text, ``<image>`` and
    ``<audio>`` are places.

    Parameters
    ----------
    given : object
        As the data has it.
    where : str
        For messages.
    counts : mapping
        How many images and recordings the sample has; of a kind that is not in it the data have none at all, and its
        place is a word like others.

    Raises
    ------
    CorruptSampleError
        No list of messages, or another number of places.
    """
    if isinstance(given, Mapping):
        given = given.get("messages", given.get("conversations"))
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise CorruptSampleError(where, "is no list of messages", 'give [{"role": ..., "content": ...}, ...]')
    messages = [_message(each, f"{where}[{i}]", counts) for i, each in enumerate(given)]
    # Images stand before recordings.
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


def tools_of(given: Any) -> Any:
    """Return the descriptions of functions that stand beside messages; None: there are none."""
    return given.get("tools") or None if isinstance(given, Mapping) else None


def check_words(messages: Sequence[Message], tokens: Mapping[str, str], where: str) -> None:
    """Refuse texts that have a processor's own tokens in them: it would look for images that are not there.

    Parameters
    ----------
    messages : sequence of dict
        As `conversation` makes them.
    tokens : mapping
        From a token to what it stands for.
    where : str
        For messages.

    Raises
    ------
    CorruptSampleError
    """
    for number, message in enumerate(messages):
        for text in (part["text"] for part in parts(message) if part["type"] == "text"):
            for token, kind in tokens.items():
                if token in text:
                    raise CorruptSampleError(
                        f"{where}: messages[{number}].content",
                        f"has the processor's token for {kind}, {token!r}, at character {text.index(token)}",
                        "write the word otherwise; contents are placed by <image> and <audio>",
                    )


def with_contents(messages: Sequence[Message], contents: Mapping[str, Sequence[Any]]) -> list[Message]:
    """Return messages whose images and recordings are in their parts, as the library's processors take them."""
    left = {kind: iter(each) for kind, each in contents.items()}

    def filled(part: dict[str, Any]) -> dict[str, Any]:
        kind = part["type"]
        return {**part, kind: next(left[kind])} if kind in left else part

    return [{**m, "content": [*map(filled, parts(m))]} if isinstance(m.get("content"), list) else m for m in messages]


def parts(message: Message) -> list[dict[str, Any]]:
    """Return the typed parts of a message; a message that only calls tools has none."""
    found: list[dict[str, Any]] = message.get("content", [])
    return found


def _message(given: Any, where: str, counts: Mapping[str, int]) -> Message:
    if not isinstance(given, Mapping):
        raise CorruptSampleError(where, f"is a {type(given).__name__}", "give an object with role and content")
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if role not in _ROLES:
        raise CorruptSampleError(f"{where}.role", f"{role!r} is none of {', '.join(_ROLES)}")
    # Templates read more than contents: calls of tools, reasoning.
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
