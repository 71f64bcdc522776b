"""A model whose layers sleep, on some ranks longer than on others, and compute very little."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.training.relayout import Relayout

WORDS, WIDTH = 20, 8
SECONDS = 2e-5
"""Of a layer's forward, for each token; the backward takes twice as long."""
Text = tuple[str, Tensor]

# A start takes as long as hundreds of iterations here, so no change would ever pay.
patch.object(Relayout, "started", lambda _self, _report: None).start()


class Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Block(nn.Module):
    def __init__(self, slowness: dict[str, float]) -> None:
        super().__init__()
        self.norm, self.inner, self.slowness = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), slowness

    def forward(self, x: Tensor) -> Tensor:
        factor = self.slowness.get(str(dist.get_rank()), 1.0) if dist.is_initialized() else 1.0
        slept = Slept.apply(x, SECONDS * len(x) * factor)
        return x + torch.tanh(self.inner(self.norm(slept)))


def build_model(seed: int, slowness: dict[str, float], layers: int = 8) -> pl.Model:
    """Layers, and how many times longer those on each process sleep."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        chain = [nn.Embedding(WORDS, WIDTH), *(Block(slowness) for _ in range(layers)), nn.Linear(WIDTH, WORDS)]
    module = pl.Module(
        "lm", chain, reads="sequence", inputs=words_of, hidden=("tokens", WIDTH), output=("tokens", WORDS)
    )
    return pl.Model([module], loss, lambda text: len(text[1]), name="slow", describe=describe)


def words_of(part: pl.Part) -> Tensor:
    return torch.cat([words for _, words in part.samples])


def loss(output: Tensor, part: pl.Part) -> Tensor:
    return nn.functional.cross_entropy(output, (words_of(part) + 1) % WORDS, reduction="sum")


def describe(text: Text) -> dict[str, Any]:
    return {"id": text[0], "text_tokens": len(text[1])}


def batches(num_iterations: int, samples: int = 8) -> Iterator[list[Text]]:
    """Batches of texts in the order of the global generators, as of a loader that shuffles with them."""
    for i in range(num_iterations):
        generator = torch.Generator().manual_seed(i)
        lengths = torch.randint(10, 30, (samples,), generator=generator).tolist()
        texts = [(f"{i}.{j}", torch.randint(WORDS, (n,), generator=generator)) for j, n in enumerate(lengths)]
        random.shuffle(texts)
        yield [texts[j] for j in torch.randperm(samples).tolist()]
