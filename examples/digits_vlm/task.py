"""The digits task as `pipeloom train` takes it: the model, its batches, their metadata, and how it is judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

import pipeloom as pl

from . import data, model
from .data import describe
from .evaluate import evaluate as evaluate_layers

__all__ = ["batches", "build_model", "describe", "evaluate"]


def build_model(seed: int, frozen: bool = False) -> pl.Model:
    """Describe the two modules; the layers and the merge of images into text are the user's own code.

    ``frozen``: the encoder stays as it was built, and nothing flows back through it.
    """
    dtype = torch.get_default_dtype()
    vision = pl.Module(
        "vision",
        model.vision_layers(seed),
        reads="images",
        inputs=partial(model.vision_inputs, dtype=dtype),
        hidden=("instances", data.PATCHES_PER_IMAGE, model.VISION_DIM),
        output=("instances", data.TOKENS_PER_IMAGE, model.LM_DIM),
        frozen=frozen,
        parallelize=model.divide,
    )
    language = pl.Module(
        "lm",
        model.lm_layers(seed),
        reads="sequence",
        after=("vision",),
        inputs=model.lm_inputs,
        context=model.lm_context,
        hidden=("tokens", model.LM_DIM),
        output=("tokens", len(data.VOCABULARY)),
        parallelize=model.divide,
    )
    return pl.Model((vision, language), model.loss, model.num_targets, name="digits_vlm")


def batches(num_iterations: int, documents_per_batch: int, seed: int = 0) -> Iterator[list[data.Document]]:
    """Yield the documents of every iteration; the same on every rank."""
    return data.batches(seed, num_iterations, documents_per_batch)


def evaluate(trained: pl.Model) -> Mapping[str, float]:
    """Read held-out documents and count what was right."""
    vision, language = (list(module.layers) for module in trained.modules)
    return evaluate_layers(vision, language, data.held_out_documents())
