"""Samples of the library's processor: their sizes, and the loss on their labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pipeloom.errors import InputError
from pipeloom.integrations.data.names import sample_name
from pipeloom.integrations.transformers.description import Encoder, Sample
from pipeloom.runtime.data.dataset import CorruptSampleError
from pipeloom.runtime.launch.device import moved
from pipeloom.runtime.model.model import Part
from pipeloom.spec.batch import AUDIO_FRAMES_PER_SECOND

_IGNORED = -100
"""Label of a token that is not a target."""
_KNOWN = ("id", "input_ids", "attention_mask", "labels")
_PER_TOKEN = ("input_ids", "labels", "attention_mask")
_EXAMPLES = (1, 2, 4)
"""Sizes of the synthetic samples from which the profiler fits costs."""


_host_copies: Any = WeakTensorKeyDictionary()
"""Version and copy of each tensor of a sample that the host has read from a device."""


def _readable(value: Any) -> Any:
    """Return a value that the host can read: ids, sizes and masks are copied once. Pixels and spectra stay."""
    if not isinstance(value, Tensor) or value.device.type == "cpu" or (value.is_floating_point() and value.dim() > 1):
        return value
    if value.is_inference():
        # It has no version.
        return value.cpu()
    version, copied = _host_copies.get(value, (None, None))
    if version != value._version:
        copied = value.detach().cpu()
        _host_copies[value] = value._version, copied
    return copied


def clean(sample: Sample) -> dict[str, Any]:
    """Return a sample with ids and labels as vectors and without entries that are None.

    Samples may be on a device. Everything that the host reads is then a copy on the host.
    """
    out = {name: _readable(value) for name, value in sample.items() if value is not None}
    for name in ("input_ids", "labels"):
        if name not in out:
            raise InputError(f"sample.{name}", "is missing", "give what the library's processor gives, and labels")
        out[name] = torch.as_tensor(out[name]).reshape(-1)
    if len(out["input_ids"]) != len(out["labels"]):
        raise InputError("sample.labels", f"has {len(out['labels'])} entries, input_ids {len(out['input_ids'])}")
    return out


def next_labels(labels: Tensor) -> Tensor:
    """Return the label of the next token for each token of a sample."""
    return torch.cat([labels[1:], labels.new_full((1,), _IGNORED)])


def num_targets(sample: Sample, *, shifts: bool = True) -> float:
    """Return the number of target tokens; ``shifts`` as in `Family`."""
    return float((clean(sample)["labels"][int(shifts) :] != _IGNORED).sum())


class Sizes:
    """Computes the sizes of samples."""

    def __init__(self, config: Any, per_token: Sequence[str], encoders: Sequence[Encoder]) -> None:
        self.config, self.encoders = config, encoders
        self.per_token = frozenset((*_PER_TOKEN, *per_token))
        """Entries of a sample with one number per token."""
        self.known = {*_KNOWN, *self.per_token, *(key for encoder in encoders for key in encoder.keys)}

    def describe(self, sample: Sample) -> dict[str, Any]:
        """Return the sizes of a sample for the planner."""
        here = clean(sample)
        for name in here:
            if name not in self.known:
                raise InputError(f"sample.{name}", "is not an input of this model", "leave it out")
        if "attention_mask" in here and not torch.as_tensor(here["attention_mask"]).all():
            raise InputError("sample.attention_mask", "has zeros", "give samples without padding")
        for name in sorted(self.per_token & here.keys()):
            if (count := torch.as_tensor(here[name]).numel()) != len(here["input_ids"]):
                raise InputError(f"sample.{name}", f"has {count} entries, input_ids {len(here['input_ids'])}")
        ids, rest = here["input_ids"], len(here["input_ids"])
        found: dict[str, Any] = {}
        pixels: list[Tensor] = []
        for encoder in self.encoders:
            instances = encoder.images(here)
            tokens = sum(each.tokens for each in instances)
            places = sum(int((ids == each).sum()) for each in encoder.ids(self.config))
            if places != tokens:
                problem = f"have {places} places for {encoder.found.reads}, whose tokens are {tokens}"
                raise CorruptSampleError("sample.input_ids", problem, "remove placeholder tokens from the text itself")
            if not instances:
                continue
            if encoder.found.crosses and len(instances) > 1:
                problem = f"has {len(instances)} instances, of which the model takes 1 per sample"
                raise InputError(f"sample.{encoder.keys[0]}", problem, "divide the sample")
            pixels += [each.pixels for each in instances]
            rest -= tokens
            if encoder.found.reads == "images":
                found["image_tokens"] = [each.tokens for each in instances]
                found["image_patches"] = [each.patches for each in instances]
            else:
                found["audio_seconds"] = [each.patches / AUDIO_FRAMES_PER_SECOND for each in instances]
                found["audio_tokens"] = [each.tokens for each in instances]
        return {"id": sample_name(here, ids, here["labels"], pixels), "text_tokens": rest, **found}

    def examples(self, name: str) -> list[dict[str, Any]]:
        """Return synthetic samples of increasing size for an encoder; none for other modules."""
        return [
            self._example(each, size)
            for each in self.encoders
            for size in _EXAMPLES
            if each.found.name == name and (size == 1 or not each.found.crosses)
        ]

    def _example(self, encoder: Encoder, size: int) -> dict[str, Any]:
        given = encoder.blank(size)
        count = sum(each.tokens for each in encoder.images({"input_ids": torch.zeros(0), **given}))
        places = [each for other in self.encoders for each in other.ids(self.config)]
        word = next(each for each in range(len(places) + 1) if each not in places)
        ids = torch.tensor([word, *[encoder.ids(self.config)[0]] * count, word])
        is_place = ids != word
        kinds = {key: is_place.long() for key in sorted(self.per_token - {*_PER_TOKEN})}
        labels = torch.where(is_place, _IGNORED, ids)
        return {"id": f"made up {size}", "input_ids": ids, "labels": labels, **kinds, **given}


def summed_loss(
    function: Callable[..., Tensor],
    num_words: int,
    logits: Tensor,
    part: Part,
    *,
    z_weight: float = 0,
    shifts: bool = True,
) -> Tensor:
    """Return the library's loss, summed over the targets of packed samples; ``shifts`` as in `Family`.

    The z-loss of a sample is a mean over its tokens, as in the library, multiplied by its number of targets.
    """
    every = [clean(part.samples[place])["labels"] for place, _ in part.instances]
    shifted = [next_labels(labels) if shifts else labels for labels in every]
    targets = moved(torch.cat(shifted), logits.device)
    loss = function(logits[None], None, num_words, num_items_in_batch=1, shift_labels=targets[None])
    if z_weight:
        squares = torch.split(logits.logsumexp(-1).pow(2), [len(labels) for labels in every])
        counts = [float((labels != _IGNORED).sum()) for labels in shifted]
        loss = loss + z_weight * torch.stack([n * each.mean() for n, each in zip(counts, squares, strict=True)]).sum()
    return loss
