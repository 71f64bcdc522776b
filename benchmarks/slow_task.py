"""A vision-language model that takes longer on one rank than elsewhere: for `benchmarks.slow_ranks`.

Its layers sleep; or they compute, and every rank has a share of a core, the slow one a smaller share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import pipeloom as pl
from pipeloom.cost.fits import FloatArray
from pipeloom.io import write_layout
from pipeloom.runtime.execute.result import Calibrator
from pipeloom.spec import Layout
from pipeloom.training.relayout import Relayout

_ROW_S = {"vision": 8e-4, "lm": 2e-5}
"""Of a layer's forward, for each image or token that it gets; the backward takes twice as long."""
_IMAGES, _TEXT = (1, 6), (40, 200)


_COMPUTED_WIDTH, _COMPUTED_ROWS = 128, {"vision": 40, "lm": 1}
"""Of layers that compute: numbers in a row, and how often each row is computed."""
NAME = "slow"
"""Of the runs."""
QUOTAS = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 10_000


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

    iteration, last = 0, 0
    is_running = False

    @classmethod
    def tick(cls, *_: object) -> None:
        """After the optimiser's step."""
        cls.iteration += 1
        if cls.iteration == cls.last:
            # Reports are written with a whole core.
            (quota_folder(dist.get_rank()) / "cpu.cfs_quota_us").write_text("-1")


def quota_folder(rank: int) -> Path:
    """Of the control group of a rank, which the benchmark makes."""
    return QUOTAS / f"pipeloom-slow-{rank}"


def _limit(share: float) -> None:
    """Give this process so much of a core."""
    folder = quota_folder(dist.get_rank())
    (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
    (folder / "cpu.cfs_quota_us").write_text(str(round(share * _PERIOD_US)))
    (folder / "cgroup.procs").write_text(str(os.getpid()))


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

    def __init__(self, row_s: float, rank: int, slower: float, until: int, width: int) -> None:
        super().__init__()
        self.row_s, self.rank, self.slower, self.until = row_s, rank, slower, until
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor, *images: Tensor) -> Tensor:
        """Take and return ``(rows, width)``; the first layer that has images, too, adds their mean to all rows."""
        is_slow = dist.is_initialized() and dist.get_rank() == self.rank and _Clock.iteration < self.until
        seconds = self.row_s * len(x) * (self.slower if is_slow else 1.0)
        slept: Tensor = _Sleep.apply(x * self.scale, seconds)  # type: ignore[no-untyped-call]
        return sum((each.mean() for each in images), slept)


class Computer(nn.Module):
    """A layer that computes each of its rows so many times."""

    def __init__(self, times: int, width: int) -> None:
        super().__init__()
        self.times = times
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, *images: Tensor) -> Tensor:
        """Take and return ``(rows, width)``; the first layer that has images, too, adds their mean to all rows."""
        computed = self.inner(x.repeat_interleave(self.times, 0)).unflatten(0, (-1, self.times)).mean(1)
        return sum((each.mean() for each in images), x + computed)


def build_model(
    seed: int,
    layers: int = 16,
    rank: int = 1,
    slower: float = 1.5,
    until: int = 10**9,
    blind: int = 0,
    width: int = 4,
    share: float = 0.0,
    last: int = 0,
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
    width : int
        Numbers in a row, which say what messages weigh.
    share : float
        Of a core, what each rank has, and layers compute; the slow rank has its share over ``slower``. 0: they sleep.
    last : int
        So many iterations have quotas.
    """
    torch.manual_seed(seed)
    if dist.is_initialized():
        _prepare_rank(blind)
        if share:
            torch.set_num_threads(1)
            _Clock.last = last
            _limit(share / slower if dist.get_rank() == rank else share)
    width = _COMPUTED_WIDTH if share else width

    def chain(name: str) -> list[nn.Module]:
        if share:
            return [Computer(_COMPUTED_ROWS[name], width) for _ in range(layers)]
        return [Sleeper(_ROW_S[name], rank, slower, until, width) for _ in range(layers)]

    vision = pl.Module(
        "vision",
        chain("vision"),
        reads="images",
        inputs=lambda part: torch.ones(len(part.instances), width),
        hidden=("instances", width),
        output=("instances", width),
    )
    language = pl.Module(
        "lm",
        chain("lm"),
        reads="sequence",
        after=("vision",),
        inputs=lambda part: torch.ones(sum(each.tokens for each in part.samples), width),
        hidden=("tokens", width),
        output=("tokens", width),
    )
    return pl.Model(
        [vision, language], lambda out, _: out.sum() * 1e-9, lambda each: each.tokens, name="slow", describe=describe
    )


def write_run(
    folder: Path,
    layout: Layout,
    task: Path,
    iterations: int,
    model: Mapping[str, object],
    *,
    deadline_s: float,
    every: int = 0,
) -> Path:
    """Write a layout and a training file for it, with six documents a rank in a batch; return the file.

    Parameters
    ----------
    model : mapping
        What the task's ``build_model`` is given.
    every : int
        Iterations from one checkpoint to the next, at which the layout may change; 0: none are written.
    """
    write_layout(folder / "layout.json", layout)
    given = "\n".join(f"{name} = {json.dumps(value)}" for name, value in model.items())
    saved = f"[checkpoint]\nevery = {every}\n" if every else ""
    ranks, adapt = layout.num_ranks, "adapt = true\n" if every else ""
    (folder / "train.toml").write_text(
        f'name = "{NAME}"\ntask = "{task}"\niterations = {iterations}\n[data]\nsamples = {6 * ranks}\n'
        f'[layout]\nranks = {ranks}\nkind = "file"\npath = "layout.json"\n{adapt}'
        f"[packing]\ntoken_budget = 300\n[model]\n{given}\n[planner]\nbudget_s = 0.3\ndeadline_s = {deadline_s}\n"
        f'[scheduler]\nname = "constant"\n{saved}'
    )
    return folder / "train.toml"


def _prepare_rank(blind: int) -> None:
    learn = Calibrator._slowness

    def learn_later(self: Calibrator, now: FloatArray) -> tuple[float, ...]:
        return learn(self, now) if _Clock.iteration >= blind else ()

    patch.object(Calibrator, "_slowness", learn_later).start()
    # What a start takes, hundreds of such iterations, would keep a short run from ever changing its layout.
    patch.object(Relayout, "started", lambda _self, _report: None).start()
    if not _Clock.is_running:
        # A layout that is changed builds the model again in the same process.
        _Clock.is_running = True
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
