"""The code of docs/training-loop.md, run inside launched processes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.cost import LayerFit, Profile
from pipeloom.runtime import Model, Module

PAGE = Path(__file__).parents[2] / "docs" / "training-loop.md"
WIDTH = 8


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(20, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.word(ids)
        return output


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def model(tied: bool = False) -> Model:
    torch.manual_seed(0)
    embed, *feeds, head = Embed(), Feed(), Feed(), Feed(), nn.Linear(WIDTH, 20)
    if tied:
        head.weight = embed.word.weight
    module = Module(
        "lm",
        [layer.double() for layer in (embed, *feeds, head)],
        reads="text",
        hidden=("tokens", WIDTH),
        output=("tokens", 20),
        inputs=lambda part: torch.cat([part.samples[i] for i, _ in part.instances]),
    )

    def loss(output: Tensor, part: Any) -> Tensor:
        ids = torch.cat([part.samples[i] for i, _ in part.instances])
        return nn.functional.cross_entropy(output, ids, reduction="sum")

    return Model([module], loss, lambda sample: float(len(sample)))


def batches() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randint(20, (int(n),), generator=generator) for n in torch.randint(5, 60, (8,), generator=generator)]
        for _ in range(4)
    ]


def train_page(shapes: list[tuple[int, int, int]], folder: str, tied: bool = False) -> list[list[float]]:
    """Train two iterations, and two more from the checkpoint, under every shape."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    fit = LayerFit((1e-4, 0, 1e-6, 0), (2e-4, 0, 2e-6, 0), (0, 0, 64, 0))
    kinds = {f"lm/{layer.kind}" for layer in model().spec.modules[0].layers}
    profile = Profile("invented", dict.fromkeys(kinds, fit), typical_s=dict.fromkeys(kinds, 1.0))
    found: list[list[float]] = []
    for number, (pipeline, data, tensor) in enumerate(shapes):
        replica = dist.get_rank() // tensor % data
        whole = batches()
        mine = (
            [samples[: len(samples) // 3] if replica == 0 else samples[len(samples) // 3 :] for samples in whole]
            if data == 2
            else whole
        )
        numbers = {id(sample): str(n) for n, sample in enumerate(itertools.chain(*mine))}

        def describe(sample: Tensor, names: dict[int, str] = numbers) -> dict[str, Any]:
            return {"id": names[id(sample)], "text_tokens": len(sample)}

        path = str(Path(folder) / str(number))
        degrees = (pipeline, data, tensor)
        first = names["train"](model(tied), profile, mine[:2], describe, *degrees, path)
        second = names["train"](model(tied), profile, mine[2:], describe, *degrees, path, resume=True)
        found.append(first + second)
    return found
