"""Moving digits as `pipeloom train` takes them: the model, its batches, their metadata, and how it is judged."""

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
    """Describe the two modules; the layers are the user's own code."""
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
    """Yield the clips of every iteration from ``start`` on; the same on every rank."""
    return data.batches(seed, num_iterations, clips_per_batch, start)


def evaluate(trained: pl.Model) -> Mapping[str, float]:
    """Make videos for held-out captions and look what they show."""
    text, video = (list(module.layers) for module in trained.modules)
    return evaluate_layers(text, video)
