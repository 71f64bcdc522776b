"""Samples of transformers that are not known by name: latents, and the arguments of the library's forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from pipeloom.errors import InputError
from pipeloom.integrations.data.names import digest_of, sample_name
from pipeloom.integrations.diffusers.flow import NoiseSampler, NoisySample
from pipeloom.integrations.diffusers.prompts import Prompts, Rows
from pipeloom.integrations.diffusers.replay import PROMPT, Calls, Division, Key, is_real, num_rows
from pipeloom.integrations.diffusers.samples import entry
from pipeloom.runtime.model.model import Part

LATENTS, TIME, WORDS = "hidden_states", "timestep", "encoder_hidden_states"
"""Arguments of the library's forward passes."""
THOUSANDTHS = (
    "AuraFlow",
    "BriaFibo2",
    "Chroma",
    "CosmosTransformer",
    "Flux",
    "Krea2",
    "LongCatImage",
    "OvisImage",
    "PRX",
    "QwenImage",
)
"""Beginnings of the names of classes whose pipelines divide the time by 1000."""
REVERSED = ("HiDreamImage", "Ideogram4", "LongCatAudio", "Lumina", "Mochi", "NucleusMoEImage", "OmniGen", "ZImage")
"""Beginnings of the names of classes whose pipelines reverse the time or negate what the transformer predicts."""
UNBATCHED = frozenset({"img_ids", "txt_ids"})
"""Arguments without a batch dimension in most classes."""
_OWN = ("id", "latents", "condition_latents", "prompt_embeds")


def arguments(kind: type) -> dict[str, bool]:
    """Return the arguments that samples may have, and whether each is required.

    Raise `InputError` if the forward pass does not take latents and a time.
    """
    given = inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]
    for name in (LATENTS, TIME):
        if name not in given:
            raise InputError("model", f"has a forward pass without {name!r}", "write its layers yourself")
    skip = ("self", "return_dict", LATENTS, TIME)
    return {name: each.default is each.empty for name, each in given.items() if name not in skip}


@dataclass(frozen=True, eq=False)
class Item:
    """One sample: its id, latents, the part of the latents that gets no noise, and the arguments by name."""

    name: str
    latents: Tensor
    condition: Tensor | None
    given: Mapping[str, Any]
    rows: Rows | None
    """Rows of the prompt, if another module embeds it."""


@dataclass(frozen=True, eq=False)
class Form:
    """How arguments are passed: which names have no batch dimension, and where latents have their channels."""

    plain: frozenset[str]
    channels: int | None
    time: float


@dataclass(frozen=True, eq=False)
class Call:
    """Calls of the parts for one sample, the number of its rows, and the shape of its latents."""

    item: Item
    calls: Calls
    count: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class GenericReader:
    """Reads samples and computes their sizes.

    Attributes
    ----------
    names : mapping of str to bool
        Arguments of the forward pass that samples may have, and whether each is required.
    record : callable
        Returns the calls of a forward pass for an `Item`.
    cache : dict
        These calls, by all that they depend on.
    """

    names: Mapping[str, bool]
    form: Form
    record: Any
    division: Division
    width: int
    sizes: Mapping[Any, int]
    """Number of entries of each stream."""
    prompts: Prompts | None = None
    """The modules that embed the prompt. None if samples have its embedding."""
    cache: dict[Any, Calls] = field(default_factory=dict, repr=False)

    @property
    def known(self) -> list[str]:
        """Names of a sample's entries."""
        embeds = WORDS in self.names and self.prompts is None
        own = [name for name in _OWN if name != "prompt_embeds" or embeds]
        more = () if self.prompts is None else self.prompts.known
        return list(dict.fromkeys([*own, *(name for name in self.names if embeds or name != WORDS), *more]))

    def read(self, sample: Mapping[str, Any]) -> Item:
        """Validate a sample. Raise `InputError` with the name of an invalid entry."""
        known = self.known
        for name in sample:
            if name not in known:
                raise InputError(f"sample.{name}", "is not an input of this model", f"choose from {', '.join(known)}")
        latents, condition = torch.as_tensor(entry(sample, "latents")), sample.get("condition_latents")
        # Both models may have an `attention_mask`: that of a sample is of the prompt's tokens.
        others = () if self.prompts is None else self.prompts.known
        given = {name: sample[name] for name in self.names if sample.get(name) is not None and name not in others}
        if sample.get("prompt_embeds") is not None:
            given[WORDS] = sample["prompt_embeds"]
        rows = None if self.prompts is None else self.prompts.read(sample)
        if rows is None and self.names.get(WORDS) and WORDS not in given:
            entry(sample, "prompt_embeds")
        name = sample_name(sample, latents, given)
        return Item(name, latents, None if condition is None else torch.as_tensor(condition), given, rows)

    def entered(self, item: Item, latents: Tensor) -> Tensor:
        """Return latents with those that get no noise, concatenated along the channels."""
        if item.condition is None:
            return latents
        axes = [
            axis
            for axis, (a, b) in enumerate(zip(latents.shape, item.condition.shape, strict=False))
            if a + b == self.form.channels
            and latents.shape[:axis] + latents.shape[axis + 1 :]
            == item.condition.shape[:axis] + item.condition.shape[axis + 1 :]
        ]
        if not axes:
            remedy = f"make the channels of both add up to {self.form.channels}, and all other sides equal"
            raise InputError(
                "sample.condition_latents",
                f"have the shape {tuple(item.condition.shape)}, latents {tuple(latents.shape)}",
                remedy,
            )
        return torch.cat([latents, item.condition.to(latents)], dim=axes[0])

    def time(self, noised: NoisySample) -> Tensor:
        """Return the time of a sample as the transformer takes it."""
        return noised.time.to(noised.target.dtype) * self.form.time

    def batched(self, item: Item, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments of the forward pass for a batch of one sample.

        Tensors get a dimension, a list becomes the list of the only sample, and a float a vector. Tuples, integers and
        mappings of such values are passed as they are.
        """
        found = {name: _batched(value, name in self.form.plain, dtype) for name, value in item.given.items()}
        if self.prompts is not None:
            found.pop(WORDS, None)
        return found

    def call(self, item: Item, dtype: torch.dtype) -> tuple[Call, dict[str, Any]]:
        """Return the calls of the parts for a sample, and the arguments of the forward pass."""
        given = self.batched(item, dtype)
        flat, spec = tree_flatten(given)
        shape = tuple(self.entered(item, item.latents.new_zeros(()).expand(item.latents.shape)).shape)
        key = (shape, item.rows, str(spec), *map(_signature, flat))
        if key not in self.cache:
            self.cache[key] = self._checked(self.record(item))
        calls = self.cache[key]
        return Call(item, calls, self.num_rows(item, calls), shape), given

    def _checked(self, calls: Calls) -> Calls:
        called = {key for key, call in calls.items() if any(shape is not None for shape in call.shapes)}
        known = {key[:2] for key in self.division.makes}
        needed = {key[:2] for keys in (self.sizes, *self.division.rows) for key in keys} - {PROMPT[:2]}
        if not needed <= called <= known:
            differ = sorted({path for path, _ in (needed - called) | (called - known)})
            problem = f"makes the model call {', '.join(differ)} more or less often than all samples of the test"
            raise InputError("sample", problem, "give from_diffusers examples=[...] with the same inputs")
        for key, size in self.sizes.items():
            shape = calls[key[:2]].shapes[key[2]]
            if shape is not None and prod(shape) != size:
                problem = f"makes {key[0]!r} return {prod(shape)} numbers, and all samples of the test {size}"
                raise InputError("sample", problem, "give from_diffusers examples=[...] of different sizes")
        return calls

    def shapes(self, item: Item, calls: Calls, layer: int) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors that a layer passes on as rows."""
        return [self._shape(item, calls, key) for key in self.division.rows[layer]]

    def _shape(self, item: Item, calls: Calls, key: Key) -> tuple[int, ...]:
        if key == PROMPT:
            return self.prompt_shape(item)
        shape = calls[key[0], key[1]].shapes[key[2]]
        assert shape is not None
        return shape

    def prompt_shape(self, item: Item) -> tuple[int, int, int]:
        """Return the shape of the prompt's embedding that another module computes."""
        assert self.prompts is not None
        assert item.rows is not None
        return (1, item.rows.seen, self.prompts.width)

    def num_rows(self, item: Item, calls: Calls) -> int:
        """Return the number of rows that hold all tensors between any two layers."""
        counts = (
            sum(num_rows(shape, self.width) for shape in self.shapes(item, calls, layer))
            for layer in range(len(self.division.rows))
        )
        return max(1, *counts)

    def describe(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sizes of a sample for the planner."""
        item = self.read(sample)
        count = self.call(item, torch.float32)[0].count
        if self.prompts is not None:
            found: dict[str, Any] = self.prompts.describe(sample)
            return found | {"id": item.name, "lengths": {"transformer": [count]}}
        words = item.given.get(WORDS)
        text = min(len(words), count - 1) if isinstance(words, Tensor) else 0
        return {"id": item.name, "text_tokens": text, "image_tokens": [count - text]}

    def items(self, part: Part) -> list[Item]:
        """Return the samples of a part."""
        return [self.read(part.samples[place]) for place, _ in part.instances]


def predicted(model: Any, latents: Tensor, time: Tensor, given: Mapping[str, Any], target: Tensor) -> Tensor:
    """Return the prediction of a transformer for a batch of one sample, in the shape of the target."""
    output = model(**{LATENTS: latents, TIME: time}, **given, return_dict=False)
    found: Tensor = (output[0] if isinstance(output, (tuple, list)) else output)[0]
    if found.shape == target.shape:
        return found
    for axis, (ours, wanted) in enumerate(zip(found.shape, target.shape, strict=False)):
        # Models that also predict a variance have twice as many channels. Its half is not trained, as in the scripts.
        if ours == 2 * wanted and found.numel() == 2 * target.numel():
            return found.narrow(axis, 0, wanted)
    problem = f"predicts the shape {tuple(found.shape)} for latents {tuple(target.shape)}"
    raise InputError("model", problem, "give latents as its pipeline passes them to the transformer")


def latents_in(reader: GenericReader, noising: NoiseSampler, dtype: torch.dtype, part: Part) -> tuple[Tensor, ...]:
    """Return the inputs of the first layer for a part: times and noisy latents of all samples."""
    items = reader.items(part)
    noised = [noising.of(item.latents, item.name, part.iteration) for item in items]
    entered = (reader.entered(item, each.noisy) for item, each in zip(items, noised, strict=True))
    times = [reader.time(each) for each in noised]
    return (torch.cat(times) if times else torch.zeros(0), *(each[None].to(dtype) for each in entered))


def _batched(value: Any, is_plain: bool, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        value = value.to(dtype) if is_real(value) else value
        return value if is_plain else value[None]
    if isinstance(value, float):
        return torch.tensor([value], dtype=dtype)
    if isinstance(value, list):
        return [value]
    if isinstance(value, tuple):
        return tuple(each.to(dtype) if is_real(each) else each for each in value)
    if isinstance(value, Mapping):
        return {name: _batched(each, False, dtype) for name, each in value.items()}
    return value


def _signature(value: Any) -> Any:
    """Return all that the shapes within a forward pass may depend on."""
    if not isinstance(value, Tensor):
        return repr(value)
    return (tuple(value.shape), "" if value.is_floating_point() else digest_of(value))
