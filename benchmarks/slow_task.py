"""A vision-language model whose layers sleep, on one rank longer than elsewhere: for `benchmarks.slow_ranks`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import pipeloom as pl
from pipeloom.cost.fits import FloatArray
from pipeloom.runtime.result import Calibrator
from pipeloom.training.relayout import Relayout

WIDTH = 4
_ROW_S = {"vision": 8e-4, "lm": 2e-5}
"""Of a layer's forward, for each image or token that it gets; the backward takes twice as long."""
_IMAGES, _TEXT = (1, 6), (40, 200)


class Document(NamedTuple):
    """A text with images, each of which is one token of it, as sizes alone."""

    name: str
    images: int
    text: int

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.images + self.text


class _Clock:
    """Iterations that this process has ended."""

    iteration = 0

    @classmethod
    def tick(cls, *_: object) -> None:
        """After the optimiser's step."""
        cls.iteration += 1


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0].clone(), None


class Sleeper(nn.Module):
    """A layer that takes time and no core; on one rank longer, from one iteration until another."""

    def __init__(self, row_s: float, rank: int, slower: float, until: int) -> None:
        super().__init__()
        self.row_s, self.rank, self.slower, self.until = row_s, rank, slower, until
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, *images: Tensor) -> Tensor:
        """Take and return ``(rows, WIDTH)``; the first layer that has images, too, adds their mean to all rows."""
        is_slow = dist.is_initialized() and dist.get_rank() == self.rank and _Clock.iteration < self.until
        seconds = self.row_s * len(x) * (self.slower if is_slow else 1.0)
        slept: Tensor = _Sleep.apply(x * self.scale, seconds)  # type: ignore[no-untyped-call]
        return sum((each.mean() for each in images), slept)


def build_model(
    seed: int, layers: int = 16, rank: int = 1, slower: float = 1.5, until: int = 10**9, blind: int = 0
) -> pl.Model:
    """Build the model.

    Parameters
    ----------
    seed : int
        Of the parameters, which nothing is learned of.
    layers : int
        Of each of both modules.
    rank : int
        That is slow.
    slower : float
        How many times longer it takes.
    until : int
        Iteration from which on it is as quick as the others.
    blind : int
        So many first iterations learn no rank's speed.
    """
    torch.manual_seed(seed)
    if dist.is_initialized():
        _prepare_rank(blind)

    def chain(row_s: float) -> list[nn.Module]:
        return [Sleeper(row_s, rank, slower, until) for _ in range(layers)]

    vision = pl.Module(
        "vision",
        chain(_ROW_S["vision"]),
        reads="images",
        inputs=lambda part: torch.ones(len(part.instances), WIDTH),
        hidden=("instances", WIDTH),
        output=("instances", WIDTH),
    )
    language = pl.Module(
        "lm",
        chain(_ROW_S["lm"]),
        reads="sequence",
        after=("vision",),
        inputs=lambda part: torch.ones(sum(each.tokens for each in part.samples), WIDTH),
        hidden=("tokens", WIDTH),
        output=("tokens", WIDTH),
    )
    return pl.Model(
        [vision, language], lambda out, _: out.sum() * 1e-9, lambda each: each.tokens, name="slow", describe=describe
    )


def _prepare_rank(blind: int) -> None:
    learn = Calibrator._slowness

    def learn_later(self: Calibrator, now: FloatArray) -> tuple[float, ...]:
        return learn(self, now) if _Clock.iteration >= blind else ()

    patch.object(Calibrator, "_slowness", learn_later).start()
    # What a start takes, hundreds of such iterations, would keep a short run from ever changing its layout.
    patch.object(Relayout, "started", lambda _self, _report: None).start()
    register_optimizer_step_post_hook(_Clock.tick)


def describe(document: Document) -> dict[str, Any]:
    """Sizes of a document."""
    return {"id": document.name, "text_tokens": document.text, "image_tokens": [1] * document.images}


def batches(num_iterations: int, samples: int = 24) -> Iterator[list[Document]]:
    """Documents of the same sizes in every iteration, so that iterations can be compared."""
    rng = np.random.default_rng(0)
    sizes = list(zip(rng.integers(*_IMAGES, samples).tolist(), rng.integers(*_TEXT, samples).tolist(), strict=True))
    for i in range(num_iterations):
        yield [Document(f"{i}.{j}", *size) for j, size in enumerate(sizes)]
