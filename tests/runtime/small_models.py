"""Small models whose layers use memory in different ways, and what really lives while a plan of them runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from pipeloom.packing import Packing
from pipeloom.plan import ExecutionPlan
from pipeloom.runtime import Emit, Executor, Model, Module, Part, ThreadHub
from pipeloom.runtime.train.evaluate import forward_executor
from pipeloom.spec import Batch, Layout, Sample
from tests.runtime.cases import copied
from tests.runtime.test_counts import Live
from tests.threads import on_threads

WIDTH, PIXELS, WORDS = 16, 10, 40
_COPIES_OUTSIDE = 3
"""Weights and two moments; gradients are made inside."""


@dataclass(frozen=True)
class Document:
    """Features of every text token, and of every patch of every image."""

    text: Tensor
    images: tuple[Tensor, ...] = ()
    name: str = ""

    @property
    def length(self) -> int:
        return len(self.text) + sum(map(len, self.images))


class Wide(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor, lengths: tuple[int, ...] = ()) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Over each sequence by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.all, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: tuple[int, ...] = ()) -> Tensor:
        q, k, v = (part.split(lengths) for part in self.all(self.norm(x)).chunk(3, -1))
        # Of a batch and a head of one each.
        heads = [[part[None, None] for part in each] for each in zip(q, k, v, strict=True)]
        mixed = [nn.functional.scaled_dot_product_attention(*each)[0, 0] for each in heads]
        return x + self.out(torch.cat(mixed))


class Project(nn.Module):
    def __init__(self, inputs: int, outputs: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, lengths: tuple[int, ...] = ()) -> Tensor:
        return torch.tanh(self.inner(x))


class Merge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, places: Tensor, images: Tensor, lengths: tuple[int, ...] = ()) -> Tensor:
        return self.inner(x).index_add(0, places, images)


class Tapped(nn.Module):
    """A layer that takes streams of the images or of its own module, and emits some."""

    def __init__(self, inner: nn.Module, takes: Sequence[str] = (), emits: Sequence[str] = ()) -> None:
        super().__init__()
        self.inner = inner
        self.take = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in takes})
        self.emit = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in emits})

    def forward(self, *args: Tensor, lengths: tuple[int, ...] = (), places: Any = None, **streams: Tensor) -> Any:
        x = self.inner(*args, lengths=lengths)
        for name, take in self.take.items():
            more = torch.tanh(take(streams[name]))
            x = x + more if name.startswith("skip") else x.index_add(0, places, more)
        return Emit(x, {name: emit(x) for name, emit in self.emit.items()}) if self.emit else x


def streaming_model(rng: random.Random, frozen: bool) -> Model:
    """The small model with features of two encoder layers for two language layers, and a skip over some of these."""
    model = small_model(rng, frozen)
    vision, lm = model.modules
    last, end = len(vision.layers) - 1, len(lm.layers) - 1
    emits = {0: ("deep0",), last: ("deep1",)}
    takes, skips = {1: ("deep0",), 2: ("deep1",), end - 1: ("skip",)}, {1: ("skip",)}
    shape = ("tokens", WIDTH)
    above = [Tapped(layer, (), emits.get(i, ())).double() for i, layer in enumerate(vision.layers)]
    below = [Tapped(x, takes.get(i, ()), skips.get(i, ())).double() for i, x in enumerate(lm.layers)]

    def context(part: Part) -> dict[str, Any]:
        assert lm.context is not None
        return lm.context(part) | {"places": _tokens_and_places(part)[1]}

    modules = (
        replace(vision, layers=above, emits={i: dict.fromkeys(names, shape) for i, names in emits.items()}),
        replace(
            lm, layers=below, context=context, takes=takes, emits={i: dict.fromkeys(n, shape) for i, n in skips.items()}
        ),
    )
    return replace(model, modules=modules)


def small_model(rng: random.Random, frozen: bool, with_encoder: bool = True) -> Model:
    """An encoder of a few layers before a language model, in double precision; or the language model alone."""
    torch.manual_seed(rng.randrange(10**6))

    def middle() -> nn.Module:
        return Wide(rng.choice((16, 32, 64))) if rng.random() < 0.6 else Attention()

    language = [Merge() if with_encoder else Project(WIDTH), *(middle() for _ in range(rng.randint(4, 6)))]
    language.append(Project(WIDTH, WORDS))
    lm = Module(
        "lm",
        [layer.double() for layer in language],
        reads="sequence",
        after=("vision",) if with_encoder else (),
        context=lambda part: {"lengths": tuple(part.samples[i].length for i, _ in part.instances)},
        inputs=_tokens_and_places if with_encoder else _tokens,
        hidden=("tokens", WIDTH),
        output=("tokens", WORDS),
    )
    if not with_encoder:
        return Model((lm,), _loss, lambda document: float(document.length))
    inner = [Wide(rng.choice((16, 48))) for _ in range(rng.randint(1, 3))]
    vision = Module(
        "vision",
        [layer.double() for layer in (Project(PIXELS), *inner)],
        reads="images",
        inputs=lambda part: torch.cat([part.samples[i].images[j] for i, j in part.instances]),
        hidden=("tokens", WIDTH),
        output=("tokens", WIDTH),
        frozen=frozen,
    )
    return Model((vision, lm), _loss, lambda document: float(document.length))


def _loss(output: Tensor, part: Part) -> Tensor:
    return output.sin().sum()


def _tokens(part: Part) -> Tensor:
    documents = [part.samples[i] for i, _ in part.instances]
    rows = [torch.zeros(sum(map(len, d.images)), WIDTH, dtype=torch.float64) for d in documents]
    return torch.cat([tensor for d, empty in zip(documents, rows, strict=True) for tensor in (d.text, empty)])


def _tokens_and_places(part: Part) -> tuple[Tensor, Tensor]:
    places: list[int] = []
    begin = 0
    for i, _ in part.instances:
        document = part.samples[i]
        places += range(begin + len(document.text), begin + document.length)
        begin += document.length
    return _tokens(part), torch.tensor(places, dtype=torch.int64)


def small_documents(rng: random.Random, count: int, with_images: bool) -> list[Document]:
    """Uneven ones; the first is images and hardly any text."""
    generator = torch.Generator().manual_seed(rng.randrange(10**6))

    def rows(length: int, width: int) -> Tensor:
        return torch.randn(length, width, generator=generator, dtype=torch.float64)

    found = [Document(rows(2, WIDTH), tuple(rows(20, PIXELS) for _ in range(4)))] if with_images else []
    while len(found) < count:
        images = rng.choice((0, 1, 1, 2, 4)) if with_images else 0
        sizes = [rng.randint(6, 20) for _ in range(images)]
        found.append(Document(rows(rng.randint(10, 50), WIDTH), tuple(rows(n, PIXELS) for n in sizes)))
    return found


def described(documents: Sequence[Document], iteration: int = 0) -> Batch:
    """Their metadata."""
    samples = [Sample(str(i), len(d.text), tuple(map(len, d.images))) for i, d in enumerate(documents)]
    return Batch(tuple(samples), iteration)


class MostLive(Live):
    """The most that lived at the end of any operation; looks who is gone only where there may be a new peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self.no_more_than = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in before:
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.no_more_than += storage.nbytes()
        if self.no_more_than > self.peak_bytes:
            self.made = {key: made for key, made in self.made.items() if not made[0].expired()}
            self.no_more_than = self.num_bytes
            self.peak_bytes = max(self.peak_bytes, self.no_more_than)
        return result


def live_peaks(
    model: Model,
    layout: Layout,
    plan: ExecutionPlan,
    packing: Packing,
    documents: Sequence[Document],
    forward_only: bool = False,
) -> list[int]:
    """Bytes that lived at most on each rank: weights, moments, and all tensors that were made, ranks being threads."""
    hub = ThreadHub()
    models = [replace(model, modules=copied(model)) for _ in range(layout.num_ranks)]

    def work(rank: int) -> int:
        executor = Executor(models[rank], layout, rank, hub.transport(rank), reduce_gradients=lambda *_: None)
        outside = 0
        for number, layers in executor.layers.items():
            copies = 1 if layout.module(layout.chunks[number].module).frozen else _COPIES_OUTSIDE
            outside += copies * sum(p.nbytes for layer in layers for p in layer.parameters())
        if forward_only:
            executor = forward_executor(executor)
        with MostLive() as live:
            executor.run(plan, packing, documents)
        return outside + live.peak_bytes

    return on_threads(hub, layout.num_ranks, work)
