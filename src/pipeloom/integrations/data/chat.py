"""Conversations: what common forms of messages say, as a chat template takes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeloom.runtime.dataset import CorruptSampleError

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
_MEDIA = ("image", "audio")

Message = dict[str, Any]


def conversation(given: Any, where: str, counts: Mapping[str, int]) -> list[Message]:
    """Messages with roles and contents; images that no message places stand before the first words of the user.

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
        places = sum(part["type"] == kind for m in messages for part in _parts(m))
        if places == counts.get(kind, 0):
            continue
        first = next((m for m in messages if m["role"] == "user"), None)
        if places or first is None:
            have = counts.get(kind, 0)
            raise CorruptSampleError(
                where, f"has {places} places for {have} of {kind}", f"give as many, or name none by <{kind}>"
            )
        first["content"] = [*({"type": kind} for _ in range(counts[kind])), *_parts(first)]
    return messages


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
        for text in (part["text"] for part in _parts(message) if part["type"] == "text"):
            for token, kind in tokens.items():
                if token in text:
                    raise CorruptSampleError(
                        f"{where}: messages[{number}].content",
                        f"has the processor's token for {kind}, {token!r}, at character {text.index(token)}",
                        "write the word otherwise; contents are placed by <image> and <audio>",
                    )


def media(messages: Sequence[Message], kind: str) -> int:
    """How many images or recordings messages have."""
    return sum(part["type"] == kind for message in messages for part in _parts(message))


def plain(messages: Sequence[Message]) -> list[Message]:
    """Contents as text where there is nothing else, as templates of language models take them."""
    return [
        {**message, "content": "".join(part["text"] for part in _parts(message))}
        if all(part["type"] == "text" for part in _parts(message))
        else message
        for message in messages
    ]


def _parts(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _message(given: Any, where: str, counts: Mapping[str, int]) -> Message:
    if not isinstance(given, Mapping):
        raise CorruptSampleError(where, f"is a {type(given).__name__}", "give an object with role and content")
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if role not in _ROLES:
        raise CorruptSampleError(f"{where}.role", f"{role!r} is none of {', '.join(_ROLES)}")
    if isinstance(content, str):
        return {"role": _ROLES[role], "content": _split(content, counts)}
    if not isinstance(content, Sequence):
        raise CorruptSampleError(f"{where}.content", f"is a {type(content).__name__}", "give text, or a list of parts")
    return {"role": _ROLES[role], "content": [_part(each, f"{where}.content[{i}]") for i, each in enumerate(content)]}


def _split(text: str, counts: Mapping[str, int]) -> list[dict[str, Any]] | str:
    marks = {f"<{kind}>": kind for kind in counts}
    if not any(mark in text for mark in marks):
        return text
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
