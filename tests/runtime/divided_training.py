"""The digits example trained by `Trainer` with layers divided over processes, for launched ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pipeloom as pl
from pipeloom.packing import PackingSpec, cost_loads
from pipeloom.planner import Planner, Setup
from pipeloom.runtime import Checkpoints, TcpPlanStore, Trainer
from pipeloom.runtime.divide import Sharding
from pipeloom.spec import Parallelism

from .training import CLIP, DOCUMENTS, check_report, data, model, optimizer, setup, task


class Degrees(NamedTuple):
    """Of parallelism, and how replicas hold their layers."""

    pipeline: int
    data: int
    tensor: int
    shard: Sharding | None = None


class Found(NamedTuple):
    """Of one rank's training."""

    losses: list[float]
    norms: list[float]
    plans: list[int]
    """One number for each iteration's plan."""
    held: int
    """Elements of parameters on this process."""
    weights: dict[str, NDArray[np.float64]]
    """Of the whole model, gathered after training."""


def divide(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Divide what can be divided by rows or columns as it is."""
    if hasattr(layer, "widen"):
        parallelize_module(layer, mesh, {"widen": ColwiseParallel(), "narrow": RowwiseParallel()})
    elif hasattr(layer, "position"):
        parallelize_module(layer, mesh, {"project": ColwiseParallel(output_layouts=Replicate())})


def divisible() -> pl.Model:
    whole = model()
    return replace(whole, modules=[replace(module, parallelize=divide) for module in whole.modules])


def setup_of(degrees: Degrees) -> Setup:
    made = setup(degrees.pipeline)
    layout = msgspec.structs.replace(made.layout, parallelism=Parallelism(degrees.tensor, degrees.data))
    return msgspec.structs.replace(made, layout=layout, packing=PackingSpec(80))


def trainer_of(degrees: Degrees, folder: str) -> Trainer:
    made = setup_of(degrees)
    planner = Planner(made, TcpPlanStore.host, deadline_s=20.0)
    return Trainer(
        divisible(), made.layout, planner, describe=task.describe, optimizer=optimizer, clip_norm=CLIP,
        checkpoints=Checkpoints(Path(folder)), timeout_s=120.0, shard=degrees.shard,
        loads=lambda batch: cost_loads(batch, made.model, made.layout, made.costs),
    )  # fmt: skip


def train_divided(all_degrees: list[Degrees], until: list[int], folder: str) -> list[Found]:
    """Train so far under every degrees, each going on from where the one before ended."""
    return [train_once(degrees, end, folder) for degrees, end in zip(all_degrees, until, strict=True)]


def train_once(degrees: Degrees, end: int, folder: str) -> Found:
    import time
    a=time.process_time(); w=time.time()
    trainer = trainer_of(degrees, folder)
    print("made", time.process_time()-a, time.time()-w, flush=True)
    first = trainer.resume()
    held = sum(local_size(p) for p in trainer._parameters)
    losses, norms, plans = [], [], []
    batches = trainer.skip_trained(data.batches(3, end, DOCUMENTS), first)
    for report in trainer.run(batches, first):
        if trainer.place.leads:
            check_report(setup_of(degrees), report)
        else:
            assert report.answer is None
        losses.append(report.loss)
        norms.append(report.gradient_norm)
        plans.append(report.num_microbatches)
    print("trained", time.process_time()-a, time.time()-w, flush=True)
    trainer.gather_model()
    weights = {
        f"{module.name}.{number}.{name}": tensor.numpy()
        for module in trainer.model.modules
        for number, layer in enumerate(module.layers)
        for name, tensor in layer.state_dict().items()
    }
    return Found(losses, norms, plans, held, weights)


def local_size(parameter: Any) -> int:
    return int(parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel())
