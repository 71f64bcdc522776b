"""Inputs of a module for a part of a batch: those of its first layer, and the arguments of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.families import Encoder, Instance, Sample, Text
from pipeloom.integrations.transformers.hollow import Arguments
from pipeloom.integrations.transformers.layers import has_mask, record
from pipeloom.integrations.transformers.packed import OnHost, as_context, as_contexts
from pipeloom.integrations.transformers.samples import clean, num_targets
from pipeloom.runtime.model.model import Part

_ENDS = "cu_seqlens"
"""The library's name for the first position of each sequence, and the end of the last one."""


def ids(part: Part) -> Tensor:
    """Return the concatenated token ids of the samples."""
    return torch.cat([clean(part.samples[place])["input_ids"] for place, _ in part.instances])


def _images(vision: Encoder, part: Part) -> list[Instance]:
    every = {place: vision.images(clean(part.samples[place])) for place in {p for p, _ in part.instances}}
    return [every[place][index] for place, index in part.instances]


def pixels(vision: Encoder, part: Part) -> Tensor:
    """Return the concatenated pixels of the instances."""
    return _joined([image.pixels for image in _images(vision, part)])


def _given(images: Sequence[Instance]) -> dict[str, Tensor]:
    return {name: _joined([image.given[name] for image in images]) for name in images[0].given}


def _joined_shape(pixels: Sequence[Tensor]) -> tuple[int, ...]:
    return (sum(map(len, pixels)), *(max(sides) for sides in zip(*(each.shape[1:] for each in pixels), strict=True)))


def _joined(pixels: Sequence[Tensor]) -> Tensor:
    """Concatenate images. Smaller ones are padded on the right and at the bottom."""
    shape = _joined_shape(pixels)
    if all(each.shape[1:] == shape[1:] for each in pixels):
        return torch.cat(tuple(pixels))
    out = pixels[0].new_zeros(shape)
    begin = 0
    for each in pixels:
        out[(slice(begin, begin + len(each)), *(slice(side) for side in each.shape[1:]))] = each
        begin += len(each)
    return out


@dataclass(frozen=True)
class TextContext:
    """Returns the arguments of the blocks of a language model for a part."""

    shell: nn.Module
    text: Text
    encoders: tuple[Encoder, ...]
    num_blocks: int
    width: int
    dtype: torch.dtype
    balances: bool = False
    """Whether the last layer computes the load-balancing loss, which needs the numbers of targets."""

    def __call__(self, part: Part) -> dict[str, Any]:
        samples = [clean(part.samples[place]) for place, _ in part.instances]
        if self.text.one_by_one:
            return as_contexts([self._calls([sample]) for sample in samples])
        return as_context(*self._calls(samples))

    def _calls(self, samples: Sequence[dict[str, Any]]) -> tuple[list[Arguments], dict[str, Any]]:
        """Return the arguments of each block for packed samples, and those of the model's own forward pass."""
        text = self.text
        lengths = tuple(len(sample["input_ids"]) for sample in samples)
        outer: dict[str, Any] = {}
        if not text.one_by_one:
            outer["position_ids"] = torch.cat([self._positions(sample) for sample in samples], dim=-1)
        for name in text.per_token:
            values = [torch.as_tensor(sample[name]).reshape(1, -1) for sample in samples if name in sample]
            if values and len(values) != len(samples):
                raise InputError(f"sample.{name}", "is present in some samples and missing in others")
            if values:
                outer[name] = torch.cat(values, dim=1)
        if self.balances:
            outer["output_router_logits"] = False
        filling = torch.zeros((), dtype=self.dtype).expand(1, sum(lengths), self.width)
        ones = torch.ones(1, sum(lengths), dtype=torch.int64)

        def call(shell: nn.Module) -> None:
            shell(inputs_embeds=filling, attention_mask=ones, use_cache=False, **outer)

        called = {each.name: self._called(each, samples) for each in self.encoders}
        found = record(self.shell, call, self.num_blocks, filling, None if text.one_by_one else lengths)
        blocks: Any = self.shell.get_submodule(self.text.blocks)
        for block, arguments in zip(blocks, found, strict=True):
            kind = getattr(block, "block_type", None)
            if len(lengths) > 1 and not has_mask(arguments) and kind not in (*text.alone, *text.pointwise):
                raise InputError(f"a {type(block).__name__}", "gets no mask", "it cannot be packed; not supported")
        if self.balances:
            outer |= {"targets": torch.tensor([num_targets(sample) for sample in samples])}
        counts = tuple(sum(len(each.images(sample)) for sample in samples) for each in self.encoders)
        return found, {**outer, "encoders": called, "lengths": lengths, "counts": counts}

    def _called(self, encoder: Encoder, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return what the layers need to know of an encoder.

        This is the arguments of its projector, if that runs in the first layer; else the sizes of videos and, for
        features of inner blocks, the mask of its tokens.
        """
        images = [image for sample in samples for image in encoder.images(sample)]
        if encoder.in_lm:
            return {**_given(images), "shape": _joined_shape([image.pixels for image in images])} if images else {}
        found: dict[str, Any] = {}
        if any(image.is_video for image in images):
            found["videos"] = tuple((image.tokens, image.is_video) for image in images)
        if encoder.taps is not None:
            ids = torch.cat([sample["input_ids"] for sample in samples])[None]
            found["places"] = torch.isin(ids, torch.tensor(encoder.ids(self.shell.config)))
        return found

    def _positions(self, sample: dict[str, Any]) -> Tensor:
        find = self.text.positions
        found = None if find is None else find(self.shell, sample)
        return torch.arange(len(sample["input_ids"]))[None] if found is None else found


@dataclass(frozen=True)
class EncoderContext:
    """Returns the arguments of the blocks of an encoder for a part."""

    shell: nn.Module
    vision: Encoder
    num_blocks: int
    hidden: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, part: Part) -> dict[str, Any]:
        images = _images(self.vision, part)
        # The arguments of the blocks depend on shapes only, not on values.
        shape = _joined_shape([image.pixels for image in images])
        pixels = torch.ones((), dtype=images[0].pixels.dtype).expand(shape)
        given = _given(images)
        rows = sum(image.patches for image in images) if self.vision.patches is None else len(images)
        filling = torch.zeros((), dtype=self.dtype).expand(rows, *self.hidden[:-1], 1)
        filling = self.vision.form.theirs(filling)

        def call(shell: Any) -> None:
            getattr(shell, self.vision.features)(pixels, **given)

        found = record(self.shell, call, self.num_blocks, filling, None)
        if self.vision.takes_lengths:
            # Attention reads the lengths on the host. On a device, each block would wait for all earlier work.
            found = [(args, {k: OnHost(v) if k == _ENDS else v for k, v in kwargs.items()}) for args, kwargs in found]
        return as_context(found, {**given, "shape": shape})
