"""The recall task for `pipeloom train`: model, batches, sample sizes and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import torch

import pipeloom as pl

from . import data, model
from .data import describe

__all__ = ["batches", "build_model", "describe", "evaluate"]


def build_model(seed: int) -> pl.Model:
    """Build the model, which is one module with layers of different kinds."""
    language = pl.Module(
        "lm",
        model.layers(seed),
        reads="sequence",
        inputs=model.inputs,
        context=model.context,
        hidden=("tokens", model.DIM),
        output=("tokens", len(data.VOCABULARY)),
    )
    return pl.Model([language], model.loss, model.num_targets, name="moe_mamba_lm")


def batches(num_iterations: int, texts_per_batch: int, seed: int = 0, start: int = 0) -> Iterator[list[data.Text]]:
    """Yield the texts of each iteration from ``start`` on. They are the same on all ranks."""
    return data.batches(seed, num_iterations, texts_per_batch, start)


@torch.no_grad()
def evaluate(trained: pl.Model) -> Mapping[str, float]:
    """Return the accuracy on held-out texts, over all texts and over long ones."""
    right: list[bool] = []
    long: list[bool] = []
    texts = data.held_out()
    for first in range(0, len(texts), 10):
        part = SimpleNamespace(samples=texts[first : first + 10])
        context = model.context(part)
        x = trained.modules[0].layers[0](model.inputs(part), **context)
        for layer in trained.modules[0].layers[1:]:
            x = layer(x, **context)
        rows, targets = model.answers(part.samples)
        right += (x[rows].argmax(1) == targets).tolist()
        long += [len(text.answers) > 8 for text in part.samples for _ in text.answers]
    hard = [ok for ok, is_long in zip(right, long, strict=True) if is_long]
    return {"answer_accuracy": sum(right) / len(right), "answer_accuracy_long": sum(hard) / len(hard)}
