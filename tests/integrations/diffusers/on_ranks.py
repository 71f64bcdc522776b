"""A tiny pipeline trained by `Trainer` from its folder, for launched ranks; and by the library itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

import pipeloom as pl
from pipeloom.integrations.diffusers.generic import library_gradients as library_chain_gradients
from pipeloom.integrations.diffusers.library import library_gradients
from pipeloom.integrations.transformers.reference import double
from pipeloom.planner import Planner
from pipeloom.runtime import ExecutionOptions, TcpPlanStore, Trainer

from ..transformers.on_ranks import invented_problem, sgd, state_of
from . import tiny


def batches(name: str) -> list[tiny.Batch]:
    """One: noise is new in every iteration, and the library is asked for the first's alone."""
    return [tiny.batch(*tiny.CASES[name][2:])]


def train_libraries(transformer: Any, text_encoder: Any, name: str) -> None:
    """Train the same step by the libraries' own forward, sample by sample."""
    source = pl.from_diffusers(transformer, text_encoder, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))
    for part in (transformer, text_encoder):
        part.requires_grad_(True)
    library_gradients(transformer, text_encoder, source.reader, source.source.noising, batches(name)[0])
    sgd([*transformer.parameters(), *text_encoder.parameters()]).step()


def train_and_save(folder: Path, name: str, to: Path) -> dict[str, int]:
    """Train as one of two ranks; returns how many elements this rank holds."""
    model = pl.from_diffusers(folder, device="meta", freeze=())
    made = invented_problem(model, 2)
    trainer = Trainer(
        model,
        made.layout,
        Planner(made, TcpPlanStore.host, deadline_s=60.0),
        optimizer=sgd,
        options=ExecutionOptions(timeout_s=60.0),
    )
    held = {
        f"{module.name}.{number}": sum(p.numel() for p in layer.parameters() if not p.is_meta)
        for module in model.modules
        for number, layer in enumerate(module.layers)
    }
    for _ in trainer.run(batches(name)):
        pass
    trainer.save_pretrained(to, shard_bytes=20_000)
    trainer.gather_model()
    found = state_of(pl.from_diffusers(to))
    for at, tensor in state_of(model).items():
        torch.testing.assert_close(found[at], tensor, rtol=0, atol=0)
    return held


def train_chain(file: str) -> float:
    """Train a chain of three modules as one of the ranks, two steps; returns the second loss."""
    transformer, encoder, batch = torch.load(file, weights_only=False)
    model = pl.from_diffusers(transformer.double(), encoder.double().eval(), freeze=())
    with double():
        made = invented_problem(model, 3)
        planner = Planner(made, TcpPlanStore.host, deadline_s=60.0)
        options = ExecutionOptions(timeout_s=60.0)
        trainer = Trainer(model, made.layout, planner, optimizer=sgd, options=options)
        return [step.loss for step in trainer.run([batch, batch])][-1]


def train_library_chain(transformer: Any, encoder: Any, batch: tiny.Batch) -> float:
    """Train the same by the libraries' own forward passes; returns the second loss."""
    source = pl.from_diffusers(transformer.double(), encoder.double().eval(), freeze=())
    parameters = [*transformer.parameters(), *encoder.parameters()]
    with double():
        for iteration in (0, 1):
            sgd(parameters).zero_grad()
            loss, _ = library_chain_gradients(
                transformer, source.reader, source.source.noising, batch, encoder, iteration
            )
            sgd(parameters).step()
    return loss
