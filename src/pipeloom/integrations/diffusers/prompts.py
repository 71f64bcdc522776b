"""Modules that embed the prompt for a transformer that is not known by name: T5, or a language model.

With a vision-language model, the result is a chain of three modules: encoder, language model and generator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.diffusers.samples import entry
from pipeloom.integrations.diffusers.text import is_t5, text_module
from pipeloom.integrations.transformers.build import from_transformers
from pipeloom.runtime.model.model import Module, Part
from pipeloom.spec import TensorShape

Sample = Mapping[str, Any]
START = "prompt_start"
"""Entry of a sample: number of tokens at the beginning of the prompt that the transformer does not see."""


@dataclass(frozen=True)
class Rows:
    """Rows of one prompt: how many the embedding has, the first one that is used, and how many rows of zeros follow."""

    count: int
    start: int = 0
    padding: int = 0

    @property
    def seen(self) -> int:
        """Number of rows that the transformer sees."""
        return self.count - self.start + self.padding


@dataclass(frozen=True, eq=False)
class Prompts:
    """The modules before the transformer, and the part of a sample that they read.

    Attributes
    ----------
    modules : sequence of Module
        The last one returns the embedding.
    known : tuple of str
        Entries of samples.
    read : callable
        Returns the rows of a sample's prompt.
    describe : callable
        Returns the sizes of a sample in these modules.
    embed : callable
        Returns the library's own embedding of a sample's prompt.
    """

    modules: Sequence[Module]
    width: int
    known: tuple[str, ...]
    read: Callable[[Sample], Rows]
    describe: Callable[[Sample], dict[str, Any]]
    embed: Callable[[Any, Sample], Tensor]

    @property
    def name(self) -> str:
        """Name of the module that returns the embedding."""
        return self.modules[-1].name


def prompts_of(encoder: Any, freeze: Sequence[str]) -> Prompts:
    """Return the modules of a text encoder. ``freeze`` may name them, or all of them by ``"text"``."""
    return _t5(encoder, freeze) if is_t5(encoder) else _language_model(encoder, freeze)


# ------------------------------------------------------------------ T5


def _t5(encoder: Any, freeze: Sequence[str]) -> Prompts:
    def prompt(sample: Sample) -> Tensor:
        ids, rows = _ids(sample), _t5_rows(sample)
        return ids[: rows.count]

    def embed(model: Any, sample: Sample) -> Tensor:
        states: Tensor = model(prompt(sample)[None])[0]
        return _padded(states[0], _t5_rows(sample))[None]

    def describe(sample: Sample) -> dict[str, Any]:
        return {"text_tokens": _t5_rows(sample).count}

    module = text_module(encoder, prompt, "text" in freeze)
    known = ("input_ids", "attention_mask")
    return Prompts([module], int(encoder.config.d_model), known, _t5_rows, describe, embed)


def _t5_rows(sample: Sample) -> Rows:
    ids = _ids(sample)
    mask = torch.as_tensor(sample.get("attention_mask", torch.ones_like(ids))).reshape(-1)
    if len(mask) != len(ids):
        raise InputError("sample.attention_mask", f"has {len(mask)} entries, input_ids {len(ids)}")
    count = int(mask.sum())
    if not count or not bool(mask[:count].all()):
        raise InputError("sample.attention_mask", "has no one, or a zero before a one", "pad prompts at their end")
    return Rows(count, padding=len(ids) - count)


def _ids(sample: Sample) -> Tensor:
    return torch.as_tensor(entry(sample, "input_ids")).reshape(-1)


def _padded(rows: Tensor, form: Rows) -> Tensor:
    return torch.cat([rows[form.start :], rows.new_zeros(form.padding, rows.shape[1])])


# ------------------------------------------------------------------ language models


_NEUTRAL = {"final_logit_softcapping": 0, "logits_scaling": 1, "logit_scale": 1, "lm_head_multiplier": 1}
"""Settings of the text that the library applies to logits, and the values without an effect."""


def _language_model(encoder: Any, freeze: Sequence[str]) -> Prompts:
    """Return the modules of a model of the transformers library without its head."""
    if getattr(encoder, "lm_head", None) is None or not hasattr(encoder, "config"):
        remedy = "use a T5EncoderModel, a UMT5EncoderModel or a language model with lm_head"
        raise InputError("text_encoder", f"is a {type(encoder).__name__}", remedy)
    config = encoder.config.get_text_config()
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(config, name, None)) not in (None, neutral):
            problem = f"is a {type(encoder).__name__} with {name} = {value}, which would change the prompt's embedding"
            raise InputError("text_encoder", problem, "encode the prompts beforehand, and give prompt_embeds")
    bare = copy.copy(encoder)
    vars(bare)["_modules"] = dict(encoder._modules)
    bare.lm_head = nn.Identity()
    # `freeze` may also name modules of the transformer, which `from_transformers` does not know.
    names = [module.name for module in from_transformers(bare).modules]
    made = from_transformers(bare, freeze=[name for name in names if "text" in freeze or name in freeze])
    width = int(encoder.config.get_text_config().hidden_size)
    assert made.describe is not None
    describe, known = made.describe, tuple(name for name in _entries(made) if name not in ("id", "labels"))

    def read(sample: Sample) -> Rows:
        count, start = len(_ids(sample)), int(sample.get(START, 0))
        if not 0 <= start < count:
            raise InputError(f"sample.{START}", f"is {start}, the prompt has {count} tokens")
        return Rows(count, start)

    def embed(model: Any, sample: Sample) -> Tensor:
        given = {name: each for name, each in sample.items() if name in known}
        for name in made.per_token & given.keys():
            given[name] = torch.as_tensor(given[name]).reshape(1, -1)
        states: Tensor = model.model(**given, use_cache=False).last_hidden_state
        return states[:, read(sample).start :]

    modules = []
    for module in made.modules:
        here: dict[str, Any] = {name: partial(_viewed, getattr(module, name), known) for name in ("inputs", "context")}
        if module is made.modules[-1]:
            here["output"] = TensorShape(("tokens", width), module.spec.layers[-1].output.dtype)
        modules.append(replace(module, **here))
    return Prompts(modules, width, (*known, START), read, lambda sample: describe(_view(sample, known)), embed)


def _entries(made: Any) -> Sequence[str]:
    return sorted(made.describe.__self__.known)


def _view(sample: Sample, known: Sequence[str]) -> dict[str, Any]:
    """Return the part of a sample that the language model reads. It has no targets of its own."""
    found = {name: each for name, each in sample.items() if name in known or name == "id"}
    return found | {"labels": _ids(sample)}


def _viewed(function: Any, known: tuple[str, ...], part: Part) -> Any:
    """Call a function of a part with the samples as the language model reads them."""
    wanted = {place for place, _ in part.instances} | set(part.span)
    samples = (_view(each, known) if place in wanted else each for place, each in enumerate(part.samples))
    return function(replace(part, samples=tuple(samples)))


def take(rows: Tensor, begin: int, form: Rows) -> tuple[Tensor, int]:
    """Return the rows of one prompt as a batch of one, and where the next prompt begins."""
    end = begin + form.count
    return _padded(rows[begin:end], form)[None], end
