"""Microbatches of an iteration: drawn from a data set of the zoo, and packed for a layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pipeloom.errors import InputError, check_count
from pipeloom.packing import Packing, packing_of
from pipeloom.spec import Batch, Layout, ModelSpec, Sample
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.datasets import (
    clips_of_iterations,
    draw_samples,
    load_mixture,
    own_clips_of_iterations,
    pack_documents,
)
from pipeloom.spec.media_tokens import as_model_makes, fitted_images

Microbatches = Sequence[Sequence[Sample]]
"""The samples of every microbatch, for one iteration of one pipeline replica."""


@dataclass(frozen=True)
class Draw:
    """Microbatches to draw from a data set of the zoo with a seed. No ``data``: the model's default."""

    num_microbatches: int
    data: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("num_microbatches", self.num_microbatches)

    def of(self, architecture: Architecture) -> Microbatches:
        """Draw the microbatches for a model."""
        return draw_microbatches(
            architecture, self.data or default_data(architecture), self.num_microbatches, self.seed
        )


def default_data(architecture: Architecture) -> str:
    """Return the data set of the zoo for a model: the papers' mixture for what it reads."""
    reads = {module.reads for module in architecture.modules}
    if "videos" in reads:
        return "video-editing" if "images" in reads else "dip-t2v"
    return "dip-vlm"


def drawn_samples(architecture: Architecture, data: str, count: int, seed: int) -> list[Sample]:
    """Draw samples of a data set as a model reads them, in random order.

    Models without images read only the texts, so there may be fewer than ``count``. Images have as many tokens as the
    model makes of their patches; of a data set in a file only if they differ clearly (`as_model_makes`).
    """
    samples = draw_samples(data, count, seed)
    reads = {module.reads for module in architecture.modules}
    if "videos" in reads:
        return samples
    if "images" not in reads:
        return [Sample(s.id, s.text_tokens) for s in samples if s.text_tokens]
    return as_model_makes(architecture, samples)[0] if data.endswith(".toml") else fitted_images(architecture, samples)


def draw_microbatches(architecture: Architecture, data: str, count: int, seed: int) -> list[list[Sample]]:
    """Draw ``count`` microbatches of samples, prepared as in the papers for what the model reads.

    Models without images read only the texts, packed the same way. Clips of a data set in a ``.toml`` file are not
    cut to 16 s.
    """
    reads = {module.reads for module in architecture.modules}
    mixture, parts = load_mixture(data)
    videos = "videos" in reads
    if videos and not all(dataset.frames for dataset, _ in parts):
        raise InputError(
            f"data {data!r}", f"has samples without videos, which {architecture.name} reads", "use dip-t2v"
        )
    factor = 2 if videos else 24
    divide: Callable[[list[Sample], int], list[list[list[Sample]]]]
    divide = own_clips_of_iterations if data.endswith(".toml") else clips_of_iterations
    while True:
        samples = drawn_samples(architecture, data, count * factor, seed)
        if videos:
            groups = next(iter(divide(samples, count)), [])
        else:
            groups = pack_documents(samples, mixture.context_tokens, mixture.max_images)[:-1]
        if len(groups) >= count:
            return groups[:count]
        factor *= 2


def repeated(batches: Microbatches, count: int) -> Microbatches:
    """Return ``count`` microbatches: the batches in turn, with ids of their own."""
    return [
        [msgspec.structs.replace(sample, id=f"{number}.{sample.id}") for sample in batch]
        for number, batch in enumerate(itertools.islice(itertools.cycle(batches), count))
    ]


def left_out(batches: Microbatches, count: int) -> list[str]:
    """Return a note if there are more batches than microbatches, and otherwise an empty list."""
    if len(batches) <= count:
        return []
    return [f"the model comes with {len(batches)} batches, of which the first {count} are the microbatches"]


def batch_of(microbatches: Microbatches) -> Batch:
    """Return all samples of an iteration, with unique ids, since the same document may be drawn twice."""
    return Batch(
        tuple(
            msgspec.structs.replace(sample, id=f"{m}.{i}")
            for m, microbatch in enumerate(microbatches)
            for i, sample in enumerate(microbatch)
        )
    )


def pack_microbatches(model: ModelSpec, layout: Layout, microbatches: Microbatches) -> Packing:
    """Pack given microbatches. Each module's part is split as the layout states."""
    members, first = [], 0
    for microbatch in microbatches:
        members.append(tuple(range(first, first + len(microbatch))))
        first += len(microbatch)
    return packing_of(batch_of(microbatches), model, layout, tuple(members))
