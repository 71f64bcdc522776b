"""`SampleBuilder`: convert examples to samples with a processor of the `transformers` library."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.integrations.data.chat import check_words, conversation, tools_of, with_contents
from pipeloom.integrations.data.chat_template import UNCUT, ChatTemplate, shared_length
from pipeloom.integrations.data.examples import Example
from pipeloom.integrations.data.processors import load_processor, with_sizes
from pipeloom.runtime.data.dataset import CorruptSampleError

IGNORED = -100
"""Label of a token that is not a target."""
ROWS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""Outputs of a processor with one number per token."""
_PART_TYPES = {"images": "image", "audio": "audio"}
"""Type of a message part for each value of `Module.reads`."""
Contents = Mapping[str, list[Any]]
"""Images and recordings by `Module.reads`. In the text half they are blank."""
TrainOn = Literal["assistant", "all"]


class SampleBuilder:
    """A loaded processor, which converts examples and their contents to samples. It may be used by several threads.

    Parameters
    ----------
    given : str or object
        The folder of a processor or tokenizer, or one of these.
    train_on : "assistant" or "all"
        Whether only the assistant's tokens are targets, or all tokens of the text.

    Attributes
    ----------
    sized : dict
        By `Module.reads`, the processing of images or recordings from their sizes or contents.
    """

    def __init__(self, given: Any, train_on: TrainOn) -> None:
        self._train_on = train_on
        self._name = given if isinstance(given, str) else type(given).__name__
        self.processor = load_processor(given) if isinstance(given, str) else given
        self._half, self.sized = with_sizes(self.processor)
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        holders = (self.processor, self.tokenizer)
        self._tokens = {
            token: kind
            for kind in ("image", "audio", "video")
            for token in (getattr(holder, f"{kind}_token", None) for holder in holders)
            if token
        }
        """Kind of content of each placeholder token."""
        self._template = ChatTemplate(self._half)
        # Tokenizers are not thread-safe.
        self._lock = threading.Lock()

    def build(
        self, example: Example, contents: Contents, by_processor: bool = False
    ) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
        """Return the sample of an example with these contents, and the sizes that the half passes on.

        By default, the half that needs only sizes makes the sample; ``by_processor``, the processor itself, which needs
        real contents.
        """
        processor = self.processor if by_processor else self._half
        with self._lock:
            for sized in self.sized.values():
                sized.passed = ()
            sample = self._sample(example, contents, processor)
            return sample, {reads: sized.passed for reads, sized in self.sized.items()}

    def _sample(self, example: Example, contents: Contents, processor: Any) -> dict[str, Any]:
        template = self._template if processor is self._half else ChatTemplate(processor)
        chat, has_template = example.messages is not None, template.text is not None
        if chat and not has_template:
            remedy = "set tokenizer.chat_template and save it there, or use a processor that has one"
            raise InputError(
                f"processor = {self._name!r}", f"has no chat template, but {example.name} has messages", remedy
            )
        if not chat and not (has_template and (contents or example.prompt)):
            return self._plain(example, contents, processor)
        turns = [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.text}]
        given = example.messages if chat else turns
        counts = {_PART_TYPES[reads]: len(contents.get(reads, ())) for reads in (*example.kinds, *contents)}
        messages, tools = conversation(given, example.name, counts), tools_of(given)
        check_words(messages, self._tokens, example.name)
        messages = template.readable(messages, tools, example.name)
        messages = with_contents(messages, {_PART_TYPES[reads]: each for reads, each in contents.items()})
        if self._train_on == "all":
            sample = _flat(template.tokens(messages, tools))
            return {**sample, "labels": self._labels(sample["input_ids"])}
        found, said = template.encode(messages, tools, example.name)
        sample = _flat(found)
        return {**sample, "labels": self._labels(sample["input_ids"], said)}

    def _plain(self, example: Example, contents: Contents, processor: Any) -> dict[str, Any]:
        """Return a sample of images, prompt and text without a chat template."""
        if type(self.processor).__name__ == "PaliGemmaProcessor":
            raise InputError(
                f"processor = {self._name!r}",
                "makes prefixes, of which every token attends to those after it",
                "call it with suffix= yourself, and pass its samples as batches",
            )
        before, text = example.prompt, example.text or ""
        if not before + text and not contents:
            raise CorruptSampleError(example.name, "has no text", "add some, or remove the sample")
        self._check_places(before + text, contents, example.name)
        for reads, each in reversed([*contents.items()]):
            place = getattr(self.processor, f"{_PART_TYPES[reads]}_token", None) or ""
            if place not in before + text:
                before = place * len(each) + before
        sample = self._process(processor, before + text, contents)
        ids, end = sample["input_ids"], self.tokenizer.eos_token_id
        if end is not None and int(ids[-1]) != end:
            sample |= {name: _longer(sample[name], name, end) for name in ROWS if name in sample}
            ids = sample["input_ids"]
        begin = 0
        if before and self._train_on == "assistant":
            begin = shared_length(ids, self._process(processor, before, contents)["input_ids"])
        return {**sample, "labels": self._labels(ids, torch.arange(len(ids)) >= begin)}

    def _check_places(self, text: str, contents: Contents, where: str) -> None:
        """Raise `CorruptSampleError` if the number of placeholder tokens in a text differs from that of contents."""
        for token, kind in self._tokens.items():
            have = sum(len(each) for reads, each in contents.items() if _PART_TYPES[reads] == kind)
            if (places := text.count(token)) not in (0, have):
                problem = f"has the processor's token for {kind}, {token!r}, {places} times for {have} of them"
                raise CorruptSampleError(where, problem, "change the text, or use one token for each")

    def _process(self, processor: Any, text: str, contents: Contents) -> dict[str, Any]:
        options: dict[str, Any] = {"return_tensors": "pt", "add_special_tokens": True}
        if self.sized:
            return _flat(processor(text=[text], **contents, **options, text_kwargs=UNCUT))
        return _flat(self.tokenizer(text, **options, **UNCUT))

    def _labels(self, ids: Tensor, is_target: Tensor | None = None) -> Tensor:
        labels = ids.clone()
        if is_target is not None:
            labels[~is_target] = IGNORED
        # Placeholders are not targets.
        for holder in (self.processor, self.tokenizer):
            for name in ("image_token_id", "audio_token_id", "video_token_id"):
                token = getattr(holder, name, None)
                if token is not None:
                    labels[ids == token] = IGNORED
        return labels


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the processor's output for one sample, without the batch dimension in the entries per token."""
    out = {name: torch.as_tensor(value) for name, value in found.items()}
    return {name: value.reshape(-1) if name in ROWS else value for name, value in out.items()}


def _longer(row: Tensor, name: str, end: int) -> Tensor:
    return torch.cat([row, row.new_full((1,), {"input_ids": end, "attention_mask": 1}.get(name, 0))])
