"""`ChatTemplate`: tokenize conversations with a processor's chat template, and mark the assistant's tokens."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.integrations.data.chat import Message, parts
from pipeloom.runtime.data.dataset import CorruptSampleError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The block of a template that contains the assistant's text."""

UNCUT = {"truncation": False}
"""Options of a tokenizer whose folder may ask for truncation."""


class ChatTemplate:
    """The chat template of a processor or a tokenizer, whose own ``apply_chat_template`` makes all tokens."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._has_parts = hasattr(processor, "tokenizer")
        tokenizer = processor.tokenizer if self._has_parts else processor
        found = getattr(processor, "chat_template", None) or tokenizer.chat_template
        named = found if isinstance(found, dict) else {"default": found}
        self.text: str | None = named.get("default")
        """The template, or None."""
        self._with_tools: str | None = named.get("tool_use") or self.text
        self._is_fast = bool(tokenizer.is_fast)

    def _chosen(self, tools: Any) -> str | None:
        """Return the template for a conversation: of several, the library takes that of tools if there are tools."""
        return self._with_tools if tools else self.text

    def _marks(self, tools: Any) -> bool:
        """Return whether the template marks what the assistant says."""
        return self._is_fast and _GENERATION.search(self._chosen(tools) or "") is not None

    def readable(self, messages: Sequence[Message], tools: Any, where: str) -> list[Message]:
        """Return messages with their contents in the form that the template supports.

        Some templates support typed parts, some text, and some a different form for each role. An unsupported form is
        rendered as nothing or as a Python list. To detect this, each text is replaced by a marker and the conversation
        is rendered. If all forms omit the contents of a message, `CorruptSampleError` is raised.
        """
        roles = sorted({message["role"] for message in messages})
        forms = [set(chosen) for n in range(len(roles) + 1) for chosen in itertools.combinations(roles, n)]
        marked, markers = _marked(messages)
        problem, fewest, failure = "", len(markers) + 1, None
        # First parts for all roles, then text for all roles, then mixtures.
        for text_roles in sorted(forms, key=lambda each: 0 < len(each) < len(roles)):
            candidate = _as_text(marked, text_roles)
            if candidate is None:
                problem = problem or "supports only text, but a message has an image or a recording"
                continue
            try:
                found = self.render(candidate, tools)
            except Exception as error:
                failure = failure or error
                continue
            lost = [role for role, marker in markers if not _is_written(marker, found)]
            if not lost:
                as_read = _as_text(messages, text_roles)
                assert as_read is not None
                return as_read
            if len(lost) < fewest:
                problem, fewest = f"omits the contents of role {lost[0]!r}", len(lost)
        if problem or failure is None:
            remedy = "use a processor whose template supports it, or remove the message"
            raise CorruptSampleError(f"{where}: messages", f"the chat template {problem}", remedy)
        raise failure

    def encode(self, messages: Sequence[Message], tools: Any, where: str) -> tuple[dict[str, Any], Tensor]:
        """Return the processor's output for a conversation, and the mask of the assistant's tokens.

        If the template has a ``generation`` block, the mask is the processor's assistant mask. Otherwise an assistant
        message consists of the tokens that it adds to the messages before it, rendered with the generation prompt.
        `InputError` is raised if these are rendered differently in the whole conversation. The messages are those of
        `readable`, with images and recordings in their parts.
        """
        marks = self._marks(tools)
        found = self.tokens(messages, tools, mask=marks)
        ids = torch.as_tensor(found["input_ids"]).reshape(-1)
        if marks:
            return found, torch.as_tensor(found.pop("assistant_masks")).reshape(-1).bool()
        said = torch.zeros_like(ids, dtype=torch.bool)
        if messages[0]["role"] == "assistant":
            remedy = 'begin with a user or system message, or set train_on = "all"'
            raise CorruptSampleError(f"{where}: messages", "begins with an assistant message", remedy)
        whole = self.render(messages, tools)

        def length(count: int, prompt: bool) -> int:
            """Return the number of tokens of the first messages."""
            first = messages[:count]
            if count == len(messages):
                return len(ids)
            if not whole.startswith(self.render(first, tools, prompt)):
                raise InputError(
                    f"{where}: messages",
                    "the chat template renders the first messages differently without those that follow",
                    'set train_on = "all", or use another template',
                )
            return shared_length(ids, torch.as_tensor(self.tokens(first, tools, prompt)["input_ids"]).reshape(-1))

        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                said[length(place, True) : length(place + 1, False)] = True
        return found, said

    def render(self, messages: Sequence[Message], tools: Any, prompt: bool = False) -> str:
        """Render messages, with or without the generation prompt."""
        found: str = self._apply(messages, tools, tokenize=False, add_generation_prompt=prompt)
        return found

    def tokens(
        self, messages: Sequence[Message], tools: Any, prompt: bool = False, mask: bool = False
    ) -> dict[str, Any]:
        """Return the processor's output for a conversation, with its mask of the assistant's tokens if ``mask``."""
        options: dict[str, Any] = {"return_assistant_tokens_mask": True} if mask else {}
        if self._has_parts:
            options["processor_kwargs"] = {"text_kwargs": UNCUT}
        options |= {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": prompt}
        return dict(self._apply(messages, tools, **options))

    def _apply(self, messages: Sequence[Message], tools: Any, **options: Any) -> Any:
        # The library's method changes the messages of some processors.
        given = [dict(message) for message in messages]
        return self._processor.apply_chat_template(given, chat_template=self._chosen(tools), tools=tools, **options)


def shared_length(ids: Tensor, before: Tensor) -> int:
    """Return the length of the common prefix of a text's tokens and those of its beginning."""
    count = min(len(ids), len(before))
    return int((ids[:count] == before[:count]).long().cumprod(0).sum())


def _marked(messages: Sequence[Message]) -> tuple[list[Message], list[tuple[str, str]]]:
    """Replace each text by a marker. Return the messages, and the role and marker of each text."""
    markers: list[tuple[str, str]] = []

    def marked(part: dict[str, Any], role: str) -> dict[str, Any]:
        if part["type"] != "text" or not part["text"].strip():
            return part
        markers.append((role, f"text{len(markers)}text"))
        return {**part, "text": markers[-1][1]}

    out = [{**m, "content": [marked(part, m["role"]) for part in parts(m)]} if "content" in m else m for m in messages]
    return out, markers


def _is_written(marker: str, rendered: str) -> bool:
    """Return whether a rendered conversation contains a marker outside of a formatted Python list."""
    return marker in rendered and not re.search(rf"""["']text["']\s*:\s*["']{marker}""", rendered)


def _as_text(messages: Sequence[Message], roles: Collection[str]) -> list[Message] | None:
    """Return messages with the contents of some roles as text, or None if one of them has other contents."""
    out = []
    for message in messages:
        if message["role"] in roles and "content" in message:
            if any(part["type"] != "text" for part in parts(message)):
                return None
            message = {**message, "content": "".join(part["text"] for part in parts(message))}
        out.append(message)
    return out
