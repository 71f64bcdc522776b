"""Samples: latents and a prompt, their sizes, and how they are batched for the transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.integrations.data.names import sample_name
from pipeloom.integrations.diffusers.families import Family, Video
from pipeloom.integrations.diffusers.flow import NoiseSampler, NoisySample
from pipeloom.runtime.model.model import Part
from pipeloom.spec.batch import FRAME_COMPRESSION, FRAMES_PER_SECOND, PIXEL_COMPRESSION

Sample = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Item:
    """One validated sample: its id, its latents of shape (channels, frames, height, width), and its sizes."""

    name: str
    latents: Tensor
    video: Video


@dataclass(frozen=True, eq=False)
class Reader:
    """Validates samples and computes their sizes.

    Attributes
    ----------
    config
        The transformer's config.
    text_width : int
        Width of the prompt's embedding.
    encodes : bool
        Whether there is a text encoder. If so, prompts are token ids.
    """

    config: Any
    family: Family
    text_width: int
    encodes: bool

    @property
    def prompt_key(self) -> str:
        """Entry of a sample that holds the prompt."""
        return "input_ids" if self.encodes else "prompt_embeds"

    def read(self, sample: Sample) -> Item:
        """Validate a sample. Raise `InputError` with the name of an invalid entry."""
        known = ["id", "latents", self.prompt_key]
        if self.encodes or self.family.attends_to_padding:
            known.append("attention_mask")
        if self.family.scale:
            known.append("rope_interpolation_scale")
        for name in sample:
            if name not in known:
                raise InputError(f"sample.{name}", "is not an input of this model", f"choose from {', '.join(known)}")
        latents, (prompt, mask) = torch.as_tensor(entry(sample, "latents")), self._prompt(sample)
        name = sample_name(sample, latents, prompt)
        seen = tuple(int(each) for each in mask.tolist()) if self.family.attends_to_padding else ()
        rows = self._rows(prompt, mask)
        video = Video(*self._sizes(latents), len(rows), len(prompt), seen, self._scale(sample))
        return Item(name, latents, video)

    def prompt(self, sample: Sample) -> Tensor:
        """Return a prompt's token ids or embedding, without padding that the text encoder does not see."""
        return self._rows(*self._prompt(sample))

    def _rows(self, prompt: Tensor, mask: Tensor) -> Tensor:
        count = len(mask) if self.family.attends_to_padding else int(mask.sum())
        if not mask[:count].all() and not self.family.attends_to_padding:
            raise InputError("sample.attention_mask", "has a zero before a one", "pad prompts at their end")
        if not mask.any():
            raise InputError(f"sample.{self.prompt_key}", "has no token", "an empty prompt has an end token")
        return prompt[:count]

    def _prompt(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return the prompt with padding, and the mask of rows that are not padding."""
        prompt = torch.as_tensor(entry(sample, self.prompt_key))
        width = 1 if self.encodes else self.text_width
        if not self.encodes and prompt.shape[-1] != width:
            raise InputError("sample.prompt_embeds", f"are {prompt.shape[-1]} wide, the model takes {width}")
        prompt = prompt.reshape(-1) if self.encodes else prompt.reshape(-1, width)
        given = sample.get("attention_mask")
        mask = torch.ones(len(prompt), dtype=torch.int64) if given is None else torch.as_tensor(given).reshape(-1)
        if len(mask) != len(prompt):
            raise InputError("sample.attention_mask", f"has {len(mask)} entries, {self.prompt_key} {len(prompt)}")
        return prompt, mask

    def _sizes(self, latents: Tensor) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        channels, patch = self.family.channels(self.config), self.family.patch(self.config)
        shape = tuple(latents.shape)
        if len(shape) != 4 or shape[0] != channels or 0 in shape:
            remedy = f"give ({channels}, frames, height, width), as the library's autoencoder returns them"
            raise InputError("sample.latents", f"have the shape {shape}", remedy)
        if any(side % of for side, of in zip(shape[1:], patch, strict=True)):
            raise InputError("sample.latents", f"of {shape[1:]} do not divide into tokens of {patch}", "crop them")
        frames, height, width = (side // of for side, of in zip(shape[1:], patch, strict=True))
        most = self.family.longest(self.config)
        if most is not None and max(frames, height, width) > most:
            raise InputError(
                "sample.latents", f"have {max(frames, height, width)} tokens along a side", f"cut to {most}"
            )
        # Only the shape is needed.
        form = self.family.enter(self.config, latents.new_zeros(()).expand(shape)).shape
        return tuple(form), (frames, height, width)

    def _scale(self, sample: Sample) -> tuple[float, ...]:
        scale = tuple(float(each) for each in sample.get("rope_interpolation_scale", self.family.scale))
        if len(scale) != len(self.family.scale):
            raise InputError("sample.rope_interpolation_scale", f"has {len(scale)} numbers", "give three")
        return scale

    def describe(self, sample: Sample) -> dict[str, Any]:
        """Return the sizes of a sample for the planner."""
        item = self.read(sample)
        frames, height, width = item.video.grid
        return {
            "id": item.name,
            "text_tokens": item.video.words,
            # Chosen so that the planner computes the right number of tokens from them.
            "video_seconds": [frames * FRAME_COMPRESSION / FRAMES_PER_SECOND],
            "video_height": [height * PIXEL_COMPRESSION],
            "video_width": [width * PIXEL_COMPRESSION],
        }

    def items(self, part: Part) -> list[Item]:
        """Return the samples of a part."""
        return [self.read(part.samples[place]) for place, _ in part.instances]

    def enter(self, latents: Tensor) -> Tensor:
        """Return latents as the transformer takes them."""
        return self.family.enter(self.config, latents)


def entry(sample: Sample, name: str) -> Any:
    """Return an entry of a sample. Raise `InputError` if it is missing."""
    if sample.get(name) is None:
        raise InputError(f"sample.{name}", "is missing", "give it with every sample")
    return sample[name]


def runs_of(items: Sequence[Item]) -> list[Video]:
    """Group consecutive samples of equal size into batches."""
    return [replace(video, count=len(list(run))) for video, run in groupby(item.video for item in items)]


def inputs_of(reader: Reader, noising: NoiseSampler, dtype: torch.dtype, part: Part) -> tuple[Tensor, ...]:
    """Return the inputs of the transformer's first layer for a part: times, and noisy latents, one batch per run."""
    items = reader.items(part)
    noised = noisy_samples(noising, items, part)
    entered = [reader.enter(each.noisy).to(dtype) for each in noised]
    batches, begin = [], 0
    for run in runs_of(items):
        batches.append(torch.stack(entered[begin : begin + run.count]))
        begin += run.count
    return (torch.cat([each.time for each in noised]), *batches)


def noisy_samples(noising: NoiseSampler, items: Sequence[Item], part: Part) -> list[NoisySample]:
    """Return the noisy samples for the part's iteration."""
    return [noising.of(item.latents, item.name, part.iteration) for item in items]


def one(sample: Sample) -> float:
    """Return the number of targets of a sample: the loss is a mean over samples."""
    del sample
    return 1.0
