"""Fig. 9: the losses of tuned and untuned training, of a model that is small enough to be trained here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom.cost import LayerFit, Profile
from pipeloom.layout import ModulePlacement, encoder_first
from pipeloom.packing import PackingSpec
from pipeloom.planner import Planner, PlanningProblem
from pipeloom.runtime import ExecutionOptions, Model, Module, Part, TcpPlanStore, Trainer
from pipeloom.runtime.launch.processes import launch
from pipeloom.spec.datasets import draw_samples
from pipeloom.tuning import TuningSpec
from pipeloom_lab.figures import Axis, line_figure
from pipeloom_lab.reproduce.part import Figure, Options, Outcome
from pipeloom_lab.reproduce.texts import make_table

RANKS, DOCUMENTS, STEPS_AN_ITERATION = 2, 16, 5
"""Ranks, documents of a batch, and training steps for each of `Options.iterations`."""
WORDS, WIDTH, PATCHES, PIXELS = 64, 32, 4, 8
SHORTER, MOST_WORDS, MOST_IMAGES = 32, 48, 3
"""DataMix1's samples have so many times more words; longer ones are cut."""
CONTEXT = 64
SPECS = {
    "Original": TuningSpec("random", "fixed", "given", "off"),
    "PipeTune": TuningSpec("algorithm1_opened", "multiples", "clusters", "frozen", CONTEXT),
    "Pipeloom": TuningSpec(),
}


class Document(NamedTuple):
    """Words that follow a rule, and images before them."""

    name: str
    words: Tensor
    images: Tensor


class _PatchMerger(nn.Module):
    """An image of ``(instances, PATCHES, WIDTH)`` becomes one token."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(PATCHES * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(x.reshape(len(x), PATCHES * WIDTH))[:, None]
        return out


class _Embedding(nn.Module):
    """Words become vectors, and images stand in their places."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor, places: Tensor, vision: Tensor, *, mask: Tensor) -> Tensor:
        del mask
        x: Tensor = self.words(ids)
        return x.index_add(0, places, vision.flatten(0, 1).to(x.dtype))


class _Block(nn.Module):
    """A token sees what is before it in its document."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU())
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x))[None].chunk(3, dim=-1)
        x = x + self.mix(functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)[0])
        out: Tensor = x + self.narrow(self.wide(x))
        return out


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        del mask
        out: Tensor = self.project(x)
        return out


def small_model(seed: int, dtype: torch.dtype) -> Model:
    """A frozen encoder of images and a causal language model, alike in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        vision = [nn.Linear(PIXELS, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), _PatchMerger()]
        language = [_Embedding(), *(_Block() for _ in range(6)), _Head()]
    for layer in (*vision, *language):
        layer.to(dtype)
    encoder = Module(
        "vision",
        vision,
        reads="images",
        inputs=partial(_images, dtype=dtype),
        hidden=("instances", PATCHES, WIDTH),
        output=("instances", 1, WIDTH),
        frozen=True,
    )
    decoder = Module(
        "lm",
        language,
        reads="sequence",
        after=("vision",),
        inputs=_words,
        context=_context,
        hidden=("tokens", WIDTH),
        output=("tokens", WORDS),
    )
    return Model((encoder, decoder), _loss, lambda document: len(document.words), name="small_vlm")


def _images(part: Part, dtype: torch.dtype) -> Tensor:
    found = [part.samples[sample].images[image] for sample, image in part.instances]
    return torch.stack(found).to(dtype) if found else torch.zeros(0, PATCHES, PIXELS, dtype=dtype)


def _words(part: Part) -> tuple[Tensor, Tensor]:
    """Ids of all tokens, images first in each document, and the places of images."""
    ids, places, end = list[Tensor](), list[int](), 0
    for document in part.samples:
        places += range(end, end + len(document.images))
        ids += [torch.zeros(len(document.images), dtype=torch.long), document.words]
        end += len(document.images) + len(document.words)
    return torch.cat(ids), torch.tensor(places, dtype=torch.long)


def _context(part: Part) -> dict[str, Tensor]:
    lengths = torch.tensor([len(document.images) + len(document.words) for document in part.samples])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return {"mask": (owner[:, None] == owner).tril_()}


def _loss(output: Tensor, part: Part) -> Tensor:
    """Of guessing every word's successor, which the images of its document shift; summed over all words."""
    rows, targets, end = list[Tensor](), list[Tensor](), 0
    for document in part.samples:
        begin, end = end + len(document.images), end + len(document.images) + len(document.words)
        rows.append(torch.arange(begin, end))
        targets.append((document.words + 1 + len(document.images)) % WORDS)
    return functional.cross_entropy(output[torch.cat(rows)], torch.cat(targets), reduction="sum")


def batches(seed: int, steps: int) -> Iterator[list[Document]]:
    """Documents with DataMix1's words and images, fewer of both."""
    drawn = draw_samples("datamix1", steps * DOCUMENTS, seed)
    random = torch.Generator().manual_seed(seed)
    for step in range(steps):
        batch = list[Document]()
        for sample in drawn[step * DOCUMENTS : (step + 1) * DOCUMENTS]:
            count = min(MOST_WORDS, max(2, sample.text_tokens // SHORTER))
            words = torch.randint(WORDS, (count,), generator=random)
            shape = (min(MOST_IMAGES, len(sample.image_tokens)), PATCHES, PIXELS)
            batch.append(Document(f"{step}.{len(batch)}", words, torch.rand(shape, generator=random)))
        yield batch


def describe(document: Document) -> dict[str, object]:
    """Sizes of a document, as the planner wants them."""
    images = len(document.images)
    return {
        "id": document.name,
        "text_tokens": len(document.words),
        "image_tokens": [1] * images,
        "image_patches": [PATCHES] * images,
    }


def problem(name: str, seed: int, dtype: str) -> PlanningProblem:
    """The problem of one way to tune: costs are invented, with encoder parts that fit into idle times."""
    spec = small_model(seed, getattr(torch, dtype)).spec
    fits = {
        f"{m.name}/{layer.kind}": LayerFit(
            (1e-5, 1e-5 if m.name == "vision" else 0, 1e-6, 0), (1e-5, 0, 2e-6, 0), (0, 0, 64, 0)
        )
        for m in spec.modules
        for layer in m.flat_layers
    }
    layout = encoder_first(spec, RANKS, lambda *_: 1.0, placements={"vision": ModulePlacement(1, 6)})
    return PlanningProblem.from_profile(
        spec, layout, Profile("invented", fits), PackingSpec(2 * CONTEXT), tuning=SPECS[name]
    )


def train_all(seed: int, steps: int, dtype: str) -> dict[str, tuple[list[float], int]]:
    """Train as one rank, once for every way to tune: losses, and how many plans came from the planner."""
    found = {}
    for name in SPECS:
        given = problem(name, seed, dtype)
        trainer = Trainer(
            small_model(seed, getattr(torch, dtype)),
            given.layout,
            Planner(given, TcpPlanStore.host, deadline_s=60.0),
            describe=describe,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
            options=ExecutionOptions(clip_norm=1.0),
        )
        losses, planned = list[float](), 0
        for report in trainer.run(batches(seed, steps)):
            losses.append(report.loss)
            planned += report.answer is not None
        found[name] = losses, planned
    return found


def figure_9(options: Options) -> Outcome:
    """Train a small model on DataMix1's sizes under every way to tune, in both precisions."""
    steps, rows, lines = STEPS_AN_ITERATION * options.iterations, [], {}
    for name in SPECS:
        problem(name, options.seeds[0], "float64").compile_kernels()  # so that no rank waits for compiling
    for dtype, digits in (("float32", 8), ("float64", 16)):
        found = launch(train_all, RANKS, options.seeds[0], steps, dtype, timeout_s=900.0)[0]
        base = found["Original"][0]
        for name, (losses, planned) in found.items():
            apart = max(abs(a - b) for a, b in zip(losses, base, strict=True))
            rows.append(
                (dtype, name, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{apart:.{digits}f}", f"{planned} of {steps}")
            )
            if dtype == "float32":
                lines[name] = [float(i + 1) for i in range(steps)], losses
    svg = line_figure(lines, x=Axis("step"), y=Axis("loss"), title="single precision")
    return Outcome(
        (make_table("pipetune/figure-9", rows, width=WIDTH, ranks=RANKS, documents=DOCUMENTS, shorter=SHORTER),),
        (Figure("figure-9", "Losses, tuned and untuned", svg),),
    )
