"""A tiny model of the library trained by `Trainer` from its folder, for launched ranks; and by the library itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef

import pipeloom as pl
from pipeloom.cost import LayerFit, Profile
from pipeloom.integrations.transformers.samples import clean, num_targets
from pipeloom.layout import separate
from pipeloom.planner import Planner, PlanningProblem
from pipeloom.runtime import ExecutionOptions, TcpPlanStore, Trainer
from pipeloom.runtime.model.sharding import Sharding
from pipeloom.spec import Parallelism

from . import tiny

RATE = 0.05
STEPS = 2


def batches(name: str) -> list[tiny.Batch]:
    """As the library's processor gives them, in single precision."""
    found = [tiny.CASES[name][1](seed) for seed in range(STEPS)]
    for number, batch in enumerate(found):
        for sample in batch:
            sample["id"] = f"{number}.{sample['id']}"
            for key, value in sample.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    sample[key] = value.float()
    return found


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def invented_problem(model: pl.Model, num_ranks: int, replicas: int = 1) -> PlanningProblem:
    """Costs are invented."""
    fit = LayerFit((1e-4, 0, 1e-6, 0), (2e-4, 0, 2e-6, 0), (0, 0, 64, 0))
    kinds = [f"{module.name}/{layer.kind}" for module in model.spec.modules for layer in module.flat_layers]
    profile = Profile("invented", dict.fromkeys(kinds, fit), typical_s=dict.fromkeys(kinds, 1e-3))
    layout = separate(model.spec, num_ranks, {}, lambda module, layer: 1.0)
    layout = msgspec.structs.replace(layout, parallelism=Parallelism(data=replicas))
    return PlanningProblem.from_profile(model.spec, layout, profile, pl.PackingSpec(400), budget_s=0.02)


def train_and_save(
    folder: Path, name: str, to: Path, pipeline: int, replicas: int = 1, shard: Sharding | None = None
) -> dict[str, int]:
    """Train as one rank; returns how many elements this rank holds."""
    model = pl.from_transformers(folder, device="meta")
    made = invented_problem(model, pipeline, replicas)
    planner = Planner(made, TcpPlanStore.host, deadline_s=60.0)
    options = ExecutionOptions(shard=shard, timeout_s=60.0)
    trainer = Trainer(model, made.layout, planner, optimizer=sgd, options=options)
    held = {
        f"{module.name}.{number}": sum(p.numel() for p in layer.parameters())
        for module in model.modules
        for number, layer in enumerate(module.layers)
        if any(not p.is_meta for p in layer.parameters())
    }
    for _ in trainer.run(batches(name)):
        pass
    trainer.save_pretrained(to, shard_bytes=20_000)
    trainer.gather_model()
    assert_saved(model, to)
    return held


def read_divided(folder: Path, replicas: int, tensor: int, shard: Sharding | None) -> list[tuple[int, list[str]]]:
    """Divide a folder's model over two processes.

    Whenever a layer has been read: its number of elements, and which parameters of those before are still whole here.
    """
    model = pl.from_transformers(folder, device="meta")
    model = replace(model, modules=[replace(module, parallelize=_divide_mlp) for module in model.modules])
    made = invented_problem(model, 1)
    layout = msgspec.structs.replace(made.layout, parallelism=Parallelism(tensor, replicas))
    found: list[tuple[int, list[str]]] = []
    kept: dict[str, StorageWeakRef] = {}
    read = model.pretrained.fill

    def watched(tensors: Mapping[str, torch.Tensor]) -> None:
        read(tensors)
        # Messages that divide a layer may hold it a moment longer than they take.
        until = time.monotonic() + 0.5
        while (whole := [name for name, ref in kept.items() if not ref.expired()]) and time.monotonic() < until:
            time.sleep(0.01)
        found.append((sum(each.numel() for each in tensors.values()), whole))
        kept.update((name, StorageWeakRef(each.untyped_storage())) for name, each in tensors.items())

    model.pretrained.fill = watched
    planner = Planner(made, TcpPlanStore.host)
    trainer = Trainer(model, layout, planner, optimizer=sgd, options=ExecutionOptions(shard=shard, timeout_s=60.0))
    trainer.gather_model()
    assert_saved(model, folder)
    return found


def read_both_ways(folder: Path) -> list[list[tuple[int, list[str]]]]:
    """In shards of two replicas, then over two tensor-parallel ranks."""
    return [read_divided(folder, 2, 1, "fsdp"), read_divided(folder, 1, 2, None)]


def _divide_mlp(layer: torch.nn.Module, mesh: Any) -> None:
    ways = {"gate_proj": ColwiseParallel, "up_proj": ColwiseParallel, "down_proj": RowwiseParallel}
    names = [name for name, _ in layer.named_modules() if name.rpartition(".")[2] in ways]
    parallelize_module(layer, mesh, {name: ways[name.rpartition(".")[2]]() for name in names})


def state_of(model: pl.Model) -> dict[str, torch.Tensor]:
    """What is saved of all layers, by our names."""
    return {
        f"{module.name}.{number}.{name}": tensor
        for module in model.modules
        for number, layer in enumerate(module.layers)
        for name, tensor in layer.state_dict().items()
    }


def assert_saved(model: pl.Model, folder: Path) -> None:
    """A folder has the very weights of a model."""
    found, wanted = (state_of(each) for each in (pl.from_transformers(folder), model))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def train_library(library: Any, name: str) -> Any:
    """The same steps by the library's own forward, sample by sample."""
    optimizer = sgd([p for p in library.parameters() if p.requires_grad])
    for batch in batches(name):
        total = sum(map(num_targets, batch))
        for sample in batch:
            if not num_targets(sample):
                continue
            given = {key: torch.as_tensor(value) for key, value in clean(sample).items() if key != "id"}
            for key in ("input_ids", "labels", "attention_mask", "token_type_ids", "mm_token_type_ids"):
                if key in given:
                    given[key] = given[key].reshape(1, -1)
            (library(**given, use_cache=False).loss * (num_targets(sample) / total)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return library


def logits(library: Any, name: str) -> list[torch.Tensor]:
    """Of every sample of a batch."""
    found = []
    with torch.no_grad():
        for sample in batches(name)[0]:
            given = {key: torch.as_tensor(value) for key, value in clean(sample).items() if key not in ("id", "labels")}
            for key in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
                if key in given:
                    given[key] = given[key].reshape(1, -1)
            found.append(library(**given, use_cache=False).logits)
    return found
