"""The digits task for `pipeloom train`: model, batches, sample sizes and evaluation."""

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
    """Build the model from two modules. If ``frozen``, the encoder is not trained and has no backward pass."""
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
    """Yield the documents of each iteration. They are the same on all ranks."""
    return data.batches(seed, num_iterations, documents_per_batch)


def evaluate(trained: pl.Model) -> Mapping[str, float]:
    """Score the answers to held-out documents."""
    vision, language = (list(module.layers) for module in trained.modules)
    return evaluate_layers(vision, language, data.held_out_documents())
