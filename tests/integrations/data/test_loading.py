"""Ranks load only what their own layers need, and train on the same numbers as with whole samples."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import pipeloom as pl
from pipeloom.integrations.data.processed import ProcessedDataset
from pipeloom.integrations.transformers.check import _copied, _Costs
from pipeloom.integrations.transformers.reference import double
from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import boundary_shapes, lower
from pipeloom.runtime import ThreadHub
from pipeloom.runtime.data.batches import bound
from pipeloom.spec import STRATEGIES, Chunk, Layout, ModuleLayout
from pipeloom.taskgraph import build_graph
from pipeloom.timeline import random_schedule, simulate
from tests.threads import on_threads

from . import made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made")
    made.save_processor(path / "processor")
    made.write_shard(path / "0.tar", made.talks(6))
    return path


def dataset_of(folder: Path) -> ProcessedDataset:
    return pl.WebDataset(folder / "0.tar", folder / "processor")


def first_batch(folder: Path, model: Any) -> Any:
    batches = bound(pl.Batches(dataset_of(folder), 6, shuffle=False), model)
    return next(iter(batches))


def run(model: Any, layout: Layout, plan: Any, packing: Any, samples: list[Any]) -> tuple[float, dict[str, Any]]:
    """Every rank a thread with samples of its own: the loss, and gradients by name, summed over ranks."""
    hub, losses, gradients = ThreadHub("tags", 60.0), 0.0, {}
    copies = [replace(model, modules=_copied(model)) for _ in samples]

    def work(rank: int) -> Any:
        # None loads ahead, one, and two.
        options = pl.ExecutionOptions(workers=rank)
        transport = hub.transport(rank)
        executor = pl.Executor(copies[rank], layout, rank, transport, options=options, reduce_gradients=lambda *_: None)
        with double():
            return executor, executor.run(plan, packing, samples[rank])

    for executor, result in on_threads(hub, len(samples), work):
        losses += result.loss_sum / result.normalizer
        for name, parameter in executor.named_parameters():
            assert parameter.grad is not None
            gradients[name] = gradients.get(name, 0) + parameter.grad
    return losses, gradients


def chunks_of(*given: tuple[str, int, int, int]) -> tuple[Chunk, ...]:
    return tuple(Chunk(module, (first, last), rank) for module, first, last, rank in given)


PIPELINED = chunks_of(("vision", 0, 1, 0), ("vision", 2, 2, 1), ("lm", 0, 1, 1), ("lm", 2, 3, 2))
REPLICATED = chunks_of(("vision", 0, 2, 0), ("vision", 0, 2, 1), ("lm", 0, 1, 0), ("lm", 2, 3, 1))


@pytest.mark.parametrize("chunks", [PIPELINED, REPLICATED], ids=["pipelined", "replicated"])
def test_a_rank_decodes_what_its_own_layers_need(folder: Path, chunks: tuple[Chunk, ...]) -> None:
    model = pl.from_transformers(made.vlm())
    ranks = 1 + max(chunk.rank for chunk in chunks)
    batches = [first_batch(folder, model) for _ in range(ranks)]
    batch = pl.batch_of(batches[0], None)
    modules = [ModuleLayout.of(module, 1) for module in model.spec.modules]
    if chunks is REPLICATED:
        modules[0] = msgspec.structs.replace(modules[0], on_ranks="replicated")
    layout = Layout(ranks, tuple(modules), chunks)
    packing = pack(batch, model.spec, layout, PackingSpec(110, "first_fit"))
    assert len(packing.microbatches) > 1
    costs: Any = _Costs("0", False, STRATEGIES)
    graph = build_graph(layout, packing, costs, backward="whole")
    schedule = random_schedule(random.Random(0), graph)
    plan = lower(graph, schedule, simulate(graph, schedule), layout, packing, boundary_shapes(model.spec, layout))
    loss, gradients = run(model, layout, plan, packing, batches)
    decoded = [samples[0].dataset.num_decoded for samples in batches]
    if chunks is PIPELINED:
        # Those that have the encoder's first layer decode each of the six images once, others none.
        assert decoded == [6, 0, 0]
    else:
        wanted = [
            sum(
                packing.parts_of(action.microbatch, "vision")[action.sub_microbatch].count
                for action in actions
                if action.verb == "F" and action.chunk.startswith("vision")
            )
            for actions in plan.ranks
        ]
        assert decoded == wanted
        assert sum(decoded) == 6
        assert 0 not in decoded
    whole = [sample.dataset.load(sample.index, "vision", (0, 1)) for sample in batches[0]]
    with double():
        alone = pl.run_undivided(model, batch, whole)
    assert loss == pytest.approx(alone, rel=1e-12)
    for name, gradient in gradients.items():
        module, number, parameter = name.split(".", 2)
        want = model.module(module).layers[int(number)].get_parameter(parameter).grad
        torch.testing.assert_close(gradient, want, rtol=1e-9, atol=1e-12)
