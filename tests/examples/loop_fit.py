"""A model with dropout, its batches, optimiser, scheduler and callbacks, for ranks and for one process."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import pipeloom as pl
from pipeloom.runtime import Checkpoints

WORDS, WIDTH, ITERATIONS = 20, 8, 6
TAKE_OVER = Checkpoints._take_over
Text = tuple[str, Tensor]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.inner, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.drop(torch.tanh(self.inner(self.norm(x))))
        return output


def build_model(dropout: float = 0.0) -> pl.Model:
    layers = [nn.Embedding(WORDS, WIDTH), *(Block(dropout) for _ in range(3)), nn.Linear(WIDTH, WORDS)]
    module = pl.Module(
        "lm", layers, reads="sequence", inputs=words_of, hidden=("tokens", WIDTH), output=("tokens", WORDS)
    )
    return pl.Model([module], loss, lambda text: len(text[1]), name="loop", describe=describe)


def build_dropping() -> pl.Model:
    return build_model(0.3)


def words_of(part: pl.Part) -> Tensor:
    return torch.cat([words for _, words in part.samples])


def loss(output: Tensor, part: pl.Part) -> Tensor:
    return nn.functional.cross_entropy(output, (words_of(part) + 1) % WORDS, reduction="sum")


def describe(text: Text) -> dict[str, Any]:
    return {"id": text[0], "text_tokens": len(text[1])}


def batches(first: int = 0, count: int = ITERATIONS) -> Iterator[list[Text]]:
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(i)
        lengths = torch.randint(2, 9, (6,), generator=generator).tolist()
        yield [(f"{i}.{j}", torch.randint(WORDS, (n,), generator=generator)) for j, n in enumerate(lengths)]


class Stream(IterableDataset[Text]):
    """The samples of some batches, one after the other, without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Text]:
        return (text for texts in batches(count=self.count) for text in texts)


def held_out() -> Iterator[list[Text]]:
    # What it draws is nobody else's business.
    torch.rand(3)
    random.random()
    return batches(100, 2)


def held_out_long() -> list[list[Text]]:
    """A sample above the token budget."""
    return [[("long", torch.zeros(80, dtype=torch.long))]]


def build_saving_slowly() -> pl.Model:
    """On ranks, checkpoints then take long."""
    if dist.is_initialized():
        Checkpoints._take_over = take_over_slowly  # type: ignore[method-assign]
    return build_model()


def take_over_slowly(checkpoints: Checkpoints, step: int) -> None:
    time.sleep(8.0)
    TAKE_OVER(checkpoints, step)


def build_diverging() -> pl.Model:
    """A model whose loss is infinite in evaluation."""
    return replace(build_model(), loss=diverging_loss)


def diverging_loss(output: Tensor, part: pl.Part) -> Tensor:
    return loss(output, part) * (1.0 if output.requires_grad else math.inf)


def shuffled() -> Iterator[list[Text]]:
    """Two passes over the samples, in orders of the global generators."""
    texts = [text for each in batches(count=2) for text in each]
    for _ in range(2):
        order = torch.randperm(len(texts)).tolist()
        random.shuffle(order)
        yield from ([texts[i] for i in order[first : first + 6]] for first in range(0, len(texts), 6))


class Drawing(pl.Callback):
    """Draws random numbers in every iteration."""

    def on_step(self, row: Any) -> None:
        torch.rand(1)
        random.random()


def grouped(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Two groups of different rates; a rank may have parameters of one of them alone."""
    first = [p for name, p in named_parameters if name.startswith(("lm.0.", "lm.1."))]
    second = [p for name, p in named_parameters if not name.startswith(("lm.0.", "lm.1."))]
    groups = [{"params": first, "lr": 0.02}, {"params": second, "lr": 0.005, "weight_decay": 0.1}]
    return torch.optim.AdamW([group for group in groups if group["params"]])


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Goes by its own last rate, not by a formula of the iteration."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


class Stopping(pl.Callback):
    """Ends the run at an evaluation."""

    def on_evaluation(self, evaluated: Any) -> None:
        raise ValueError(f"stopped at {evaluated.iteration}")


class Slow(pl.Callback):
    """Takes long for one iteration, one evaluation and one checkpoint."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step(self, row: Any) -> None:
        if row.iteration == 0:
            time.sleep(self.seconds)

    def on_evaluation(self, evaluated: Any) -> None:
        if evaluated.iteration == 3:
            time.sleep(self.seconds)

    def on_checkpoint(self, iteration: int, path: Path) -> None:
        if iteration == 2:
            time.sleep(self.seconds)


class Recorder(pl.Callback):
    """Writes what it is told into a file."""

    def __init__(self, file: Path, fails: bool = False) -> None:
        self.file, self.fails = file, fails

    def _write(self, text: str) -> None:
        with self.file.open("a") as file:
            file.write(text + "\n")

    def on_step(self, row: Any) -> None:
        self._write(f"step {row.iteration} {row.learning_rate:g}")

    def on_evaluation(self, evaluated: Any) -> None:
        self._write(f"evaluation {evaluated.iteration}")

    def on_checkpoint(self, iteration: int, path: Path) -> None:
        if self.fails:
            raise ValueError("no more of this")
        assert (path / "trainer.json").exists()
        self._write(f"checkpoint {iteration}")

    def on_end(self, summary: Any) -> None:
        self._write(f"end {summary.iterations}")
