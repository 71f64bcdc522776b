"""ChatTemplate: conversations as a processor's own chat template writes them, and which tokens the assistant says."""

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
"""The block in which a template writes what the assistant says."""


class ChatTemplate:
    """The chat template of a processor or a tokenizer.

    The processor's own ``apply_chat_template`` makes all tokens.

    Parameters
    ----------
    processor : object
        A processor or a tokenizer of the `transformers` library.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._has_parts = hasattr(processor, "tokenizer")
        tokenizer = processor.tokenizer if self._has_parts else processor
        found = getattr(processor, "chat_template", None) or tokenizer.chat_template
        self.text: str | None = found.get("default") if isinstance(found, dict) else found
        """The template; None: there is none."""
        self._marks = bool(self.text and _GENERATION.search(self.text)) and tokenizer.is_fast

    def readable(self, messages: Sequence[Message], tools: Any, where: str) -> list[Message]:
        """Return messages with their contents in the form that the template reads.

        Some templates read typed parts, some read text, and some read text of one role and parts of another. What a
        template does not read, it renders as nothing or as a Python list. So the template first renders the same
        conversation with a marker in place of every text.

        Raises
        ------
        CorruptSampleError
            The template leaves out what a message says.
        """
        roles = sorted({message["role"] for message in messages})
        forms = [set(chosen) for n in range(len(roles) + 1) for chosen in itertools.combinations(roles, n)]
        marked, markers = _marked(messages)
        problem, fewest, failure = "", len(markers) + 1, None
        # Parts for all roles, then text for all, then mixtures.
        for text_roles in sorted(forms, key=lambda each: 0 < len(each) < len(roles)):
            candidate = _as_text(marked, text_roles)
            if candidate is None:
                problem = problem or "reads contents as text, and has no place for an image or a recording"
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
                problem, fewest = f"does not write what {lost[0]!r} says", len(lost)
        if problem or failure is None:
            remedy = "use a processor whose template writes all of it, or leave the message out"
            raise CorruptSampleError(f"{where}: messages", f"the chat template {problem}", remedy)
        raise failure

    def encode(self, messages: Sequence[Message], tools: Any, where: str) -> tuple[dict[str, Any], Tensor]:
        """Return what the processor gives for a conversation, and which of its tokens the assistant says.

        Where the template has a ``generation`` block, these are the tokens of the processor's assistant mask. Elsewhere
        they are the tokens that each message of the assistant adds to what the template writes before it, with the
        generation prompt.

        Parameters
        ----------
        messages : sequence of dict
            As `readable` returns them, with images and recordings in their parts.
        tools : object
            Descriptions of functions, for the template.
        where : str
            For messages.

        Raises
        ------
        InputError
            The template writes the beginning of a conversation differently from the whole of it.
        """
        found = self.tokens(messages, tools)
        ids = torch.as_tensor(found["input_ids"]).reshape(-1)
        if self._marks:
            return found, torch.as_tensor(found.pop("assistant_masks")).reshape(-1).bool()
        said = torch.zeros_like(ids, dtype=torch.bool)
        if messages[0]["role"] == "assistant":
            remedy = 'let a user or the system speak first, or train_on = "all"'
            raise CorruptSampleError(f"{where}: messages", "begins with the assistant, whom nobody asked", remedy)
        whole = self.render(messages, tools)

        def length(count: int, prompt: bool) -> int:
            """Return how many of the tokens the first messages make up."""
            first = messages[:count]
            if count == len(messages):
                return len(ids)
            if not whole.startswith(self.render(first, tools, prompt)):
                raise InputError(
                    f"{where}: messages",
                    "the chat template writes the beginning of a conversation otherwise than the whole of it",
                    'train_on = "all", or a template that does not',
                )
            return shared_length(ids, torch.as_tensor(self.tokens(first, tools, prompt)["input_ids"]).reshape(-1))

        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                said[length(place, True) : length(place + 1, False)] = True
        return found, said

    def render(self, messages: Sequence[Message], tools: Any, prompt: bool = False) -> str:
        """Return what the template writes, with or without the generation prompt."""
        found: str = self._apply(messages, tools, tokenize=False, add_generation_prompt=prompt)
        return found

    def tokens(self, messages: Sequence[Message], tools: Any, prompt: bool = False) -> dict[str, Any]:
        """Return what the processor gives for a conversation, with its own mask of what the assistant says."""
        options: dict[str, Any] = {"return_assistant_tokens_mask": True} if self._marks else {}
        if self._has_parts:
            # A tokenizer's folder may ask for truncation.
            options["processor_kwargs"] = {"text_kwargs": {"truncation": False}}
        options |= {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": prompt}
        return dict(self._apply(messages, tools, **options))

    def _apply(self, messages: Sequence[Message], tools: Any, **options: Any) -> Any:
        # The library's method changes the messages of some processors.
        given = [dict(message) for message in messages]
        return self._processor.apply_chat_template(given, chat_template=self.text, tools=tools, **options)


def shared_length(ids: Tensor, before: Tensor) -> int:
    """Return how many tokens of a text are those of its beginning, whose last ones may join with what comes next."""
    count = min(len(ids), len(before))
    return int((ids[:count] == before[:count]).long().cumprod(0).sum())


def _marked(messages: Sequence[Message]) -> tuple[list[Message], list[tuple[str, str]]]:
    """Put a marker in place of every text; return the messages, and the role and marker of each text."""
    markers: list[tuple[str, str]] = []

    def marked(part: dict[str, Any], role: str) -> dict[str, Any]:
        if part["type"] != "text" or not part["text"].strip():
            return part
        markers.append((role, f"text{len(markers)}text"))
        return {**part, "text": markers[-1][1]}

    out = [{**m, "content": [marked(part, m["role"]) for part in parts(m)]} if "content" in m else m for m in messages]
    return out, markers


def _is_written(marker: str, rendered: str) -> bool:
    """Return whether a marker is in a rendered conversation, and not inside a list that was turned into text."""
    return marker in rendered and not re.search(rf"""["']text["']\s*:\s*["']{marker}""", rendered)


def _as_text(messages: Sequence[Message], roles: Collection[str]) -> list[Message] | None:
    """Return messages with the contents of some roles as text; None where one of these has other contents."""
    out = []
    for message in messages:
        if message["role"] in roles and "content" in message:
            if any(part["type"] != "text" for part in parts(message)):
                return None
            message = {**message, "content": "".join(part["text"] for part in parts(message))}
        out.append(message)
    return out
