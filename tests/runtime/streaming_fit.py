"""A model without declared shapes, with streams and layer losses, and its batches, for ranks and one process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

import pipeloom as pl
from tests.runtime.small_models import Document, Tapped, small_documents, streaming_model

ITERATIONS = 3


class Regular(Tapped):
    """Adds the size of its output to the loss."""

    def forward(self, *args: Tensor, lengths: tuple[int, ...] = (), places: Any = None, **streams: Tensor) -> Any:
        given = super().forward(*args, lengths=lengths, places=places, **streams)
        output = given.output if isinstance(given, pl.Emit) else given
        more: Mapping[str, Tensor] = given.streams if isinstance(given, pl.Emit) else {}
        return pl.Emit(output, more, 0.01 * output.square().sum())


def build_model() -> pl.Model:
    model = streaming_model(random.Random(0), frozen=False)
    modules = []
    for module in model.modules:
        for layer in module.layers[1:-1]:
            layer.__class__ = Regular
        emits = {i: dict.fromkeys(streams) for i, streams in module.emits.items()}
        modules.append(replace(module, hidden=None, output=None, emits=emits))
    return replace(model, modules=modules)


def batches() -> Iterator[list[Document]]:
    for number in range(ITERATIONS):
        documents = small_documents(random.Random(number), 5, with_images=True)
        yield [replace(document, name=f"{number}.{i}") for i, document in enumerate(documents)]


def describe(document: Document) -> dict[str, Any]:
    return {"id": document.name, "text_tokens": len(document.text), "image_tokens": [len(x) for x in document.images]}
