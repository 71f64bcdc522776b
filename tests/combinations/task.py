"""A small vision-language model in double precision as a task, and the gradients of its training by one process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pipeloom as pl
from pipeloom.runtime import run_undivided
from pipeloom.spec import batch_from_dicts
from tests.runtime.small_models import Document, Wide, small_documents, small_model

ITERATIONS, SEED, RATE = 3, 28, 1e-3
_DOCUMENTS = 7


def build_model(seed: int, frozen: bool = False) -> pl.Model:
    whole = small_model(random.Random(seed), frozen)
    return replace(whole, modules=tuple(replace(module, parallelize=divide) for module in whole.modules))


def divide(layer: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(layer, Wide):
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def batches(num_iterations: int) -> Iterator[list[Document]]:
    for iteration in range(num_iterations):
        documents = small_documents(random.Random(iteration), _DOCUMENTS, with_images=True)
        yield [replace(document, name=f"{iteration}-{number}") for number, document in enumerate(documents)]


def describe(document: Document) -> Mapping[str, Any]:
    return {
        "id": document.name,
        "text_tokens": len(document.text),
        "image_tokens": [len(image) for image in document.images],
    }


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain descent: a weight has changed by the sum of its gradients."""
    return torch.optim.SGD(parameters, lr=RATE, foreach=False)


def evaluate(trained: pl.Model) -> Mapping[str, float]:
    """Of all gradients that training has summed, the largest difference from one process's, relative to the largest."""
    frozen = any(module.frozen for module in trained.modules)
    begun = build_model(SEED, frozen)
    whole = build_model(SEED, frozen)
    train_undivided(whole)
    far = largest = 0.0
    for first, wanted, found in zip(weights(begun), weights(whole), weights(trained), strict=True):
        far = max(far, float((found.detach() - wanted.detach()).abs().max()))
        largest = max(largest, float((wanted.detach() - first.detach()).abs().max()))
    return {"difference": far / largest}


def train_undivided(model: pl.Model) -> None:
    descent = optimizer(weights(model))
    for iteration, samples in enumerate(batches(ITERATIONS)):
        descent.zero_grad()
        run_undivided(model, batch_from_dicts([describe(sample) for sample in samples], iteration), samples)
        descent.step()


def weights(model: pl.Model) -> list[nn.Parameter]:
    return [parameter for module in model.modules for layer in module.layers for parameter in layer.parameters()]
