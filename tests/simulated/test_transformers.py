"""Models of the transformers library on the simulated accelerator."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import pipeloom as pl
from pipeloom.integrations.transformers import check
from pipeloom.layout import single_rank
from pipeloom.packing import PackingSpec, budget_tokens, pack
from pipeloom.runtime import ExecutionOptions, Executor, ThreadHub
from pipeloom.runtime.data.prefetch import batch_of
from pipeloom.runtime.launch.device import moved
from pipeloom.runtime.model.model import make_part
from tests.integrations.transformers import tiny
from tests.runtime.cases import assert_equal_gradients

from . import device as sim

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen2_5_omni", "llava_onevision", "gemma3")


WITHOUT_WAITS = ("qwen3", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni")
"""Where the library makes no positions on the device to look at them."""


@pytest.mark.parametrize("name", WITHOUT_WAITS)
def test_the_host_waits_for_nothing_until_the_end(name: str) -> None:
    """Images are placed in the text by masks, and positions follow from numbers, all of which the host has."""
    model, batch = tiny.make(name)
    made = pl.from_transformers(model)
    drawn = check._draw(random.Random(0), made, batch_of(batch, made.describe, 0), 1)

    def gradients(device: str) -> dict[str, torch.Tensor]:
        mine, hub = replace(made, modules=check._copied(made)), ThreadHub()
        options = ExecutionOptions(device=device)  # type: ignore[arg-type]
        executor = Executor(mine, drawn.layout, 0, hub.transport(0), options=options, sum_tied=lambda *_: None)
        before = sim.world().num_waits
        executor.run(drawn.plan, drawn.packing, batch)
        # At the end, for the times and for the loss.
        assert sim.world().num_waits - before == (2 if device == sim.KIND else 0)
        return {key: each.grad.cpu() for key, each in executor.named_parameters() if each.grad is not None}

    assert_equal_gradients(gradients(sim.KIND), gradients("cpu"), 1e-5)  # type: ignore[arg-type]


def on_device(batch: tiny.Batch) -> tiny.Batch:
    return [{k: v.to(sim.KIND) if isinstance(v, torch.Tensor) else v for k, v in sample.items()} for sample in batch]


def contexts(made: Any, batch: tiny.Batch) -> list[Any]:
    described = batch_of(batch, made.describe, 0)
    tokens = int(budget_tokens(described, made.spec).sum())
    packing = pack(described, made.spec, single_rank(made.spec, {}), PackingSpec(tokens))
    found = []
    for microbatch in range(len(packing.microbatches)):
        for module in made.modules:
            for sub in range(len(packing.parts_of(microbatch, module.name))):
                part = make_part(module.spec, packing, batch, microbatch, sub)
                found.append((module.context(part), module.inputs(part) if module.inputs else ()))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_contexts_of_samples_on_the_device_are_those_of_the_host(name: str) -> None:
    model, batch = tiny.make(name)
    made = pl.from_transformers(model)
    wanted, found = contexts(made, batch), contexts(made, on_device(batch))
    assert len(wanted) == len(found)
    for (one, _), (other, _) in zip(wanted, found, strict=True):
        assert one.keys() == other.keys()
        for value, same in zip(tree_leaves(one), tree_leaves(other), strict=True):
            if isinstance(value, torch.Tensor):
                assert same.device.type == "cpu"
                torch.testing.assert_close(same, value, rtol=0, atol=0)
    # Pixels are never copied to the host.
    assert any(isinstance(x, sim.SimTensor) and x.is_floating_point() for _, given in found for x in tree_leaves(given))


def test_the_host_reads_lengths_of_windows_without_the_device() -> None:
    model, batch = tiny.make("qwen2_5_vl")
    made = pl.from_transformers(model)
    context = moved(contexts(made, batch)[0][0], sim.KIND)
    (calls,) = context.pop("calls")
    _, given = calls.block(0, context)
    assert given["cu_seqlens"].device.type == "cpu"
    assert all(each.device.type == sim.KIND for each in given["position_embeddings"])
