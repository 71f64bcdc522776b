"""The moving-digits task for `pipeloom train`: model, batches, sample sizes and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

import pipeloom as pl

from . import data, model
from .data import describe
from .evaluate import evaluate as evaluate_layers

__all__ = ["batches", "build_model", "describe", "evaluate"]


def build_model(seed: int) -> pl.Model:
    """Build the model from two modules."""
    dtype = torch.get_default_dtype()
    text = pl.Module(
        "text",
        model.text_layers(seed),
        reads="text",
        inputs=model.text_inputs,
        context=model.text_context,
        hidden=("tokens", model.DIM),
        output=("instances", model.DIM),
    )
    video = pl.Module(
        "dit",
        model.video_layers(seed),
        reads="videos",
        after=("text",),
        inputs=partial(model.video_inputs, dtype=dtype),
        context=partial(model.video_context, dtype=dtype),
        hidden=("tokens", model.DIM),
        output=("tokens", data.PIXELS),
    )
    return pl.Model((text, video), model.loss, model.num_targets, name="moving_digits")


def batches(num_iterations: int, clips_per_batch: int, seed: int = 0, start: int = 0) -> Iterator[list[data.Clip]]:
    """Yield the clips of each iteration from ``start`` on. They are the same on all ranks."""
    return data.batches(seed, num_iterations, clips_per_batch, start)


def evaluate(trained: pl.Model) -> Mapping[str, float]:
    """Score generated videos for held-out captions."""
    text, video = (list(module.layers) for module in trained.modules)
    return evaluate_layers(text, video)
