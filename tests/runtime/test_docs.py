from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import torch

from pipeloom.layout import ModulePlacement, separate
from pipeloom.packing import PackingSpec, pack
from pipeloom.runtime import Model
from pipeloom.spec import batch_from_dicts
from pipeloom.taskgraph import build_graph
from tests.plan.cases import Case, RandomCosts, earliest, random_schedule

from .cases import Run, assert_equal_gradients, expected, run_threads, take_gradients, total_loss

PAGE = Path(__file__).parents[2] / "docs" / "bring-your-own-model.md"


def test_the_model_of_the_page_runs_and_is_exact() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(code, names)
    model: Model = names["build_model"]()
    samples = [
        (torch.tensor([5, 0, 7, 0]), [torch.randn(8), torch.randn(8)], "a"),
        (torch.tensor([9, 3, 8]), [], "b"),
        (torch.tensor([0, 2]), [torch.randn(8)], "c"),
    ]
    batch = batch_from_dicts([names["describe"](sample) for sample in samples])
    placements = {"vision": ModulePlacement(1, 1), "lm": ModulePlacement(2)}
    layout = separate(model.spec, 2, placements, lambda *_: 1.0)
    packing = pack(batch, model.spec, layout, PackingSpec(token_budget=5))
    graph = build_graph(layout, packing, RandomCosts(0, True), backward="split")
    schedule = random_schedule(random.Random(0), graph)
    chosen = graph.with_candidates(schedule.candidate)
    run = Run(Case(model.spec, layout, packing, graph, schedule, earliest(chosen, schedule)), model, samples)
    loss, wanted = expected(run)
    assert abs(total_loss(run_threads(run)) - loss) < 1e-5
    assert_equal_gradients(take_gradients(model), wanted, 1e-5)


def test_the_loader_of_the_page_counts_what_its_description_says() -> None:
    (model_code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    loader_code, *_ = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    samples = [
        (torch.tensor([5, 0, 7, 0]), [torch.randn(8), torch.randn(8)], "a"),
        (torch.tensor([9, 3, 8]), [], "b"),
        (torch.tensor([0, 2]), [torch.randn(8)], "c"),
    ]
    names: dict[str, Any] = {"dataset": samples}
    exec(model_code, names)
    exec(loader_code.partition("trainer =")[0].replace("num_workers=2", "num_workers=0"), names)
    (batch,) = names["batches"]
    for sample, reported in zip(batch, batch.metadata, strict=True):
        (wanted,) = batch_from_dicts([names["describe"](sample)]).samples
        assert (reported.id, reported.text_tokens, reported.image_tokens) == (
            wanted.id,
            wanted.text_tokens,
            wanted.image_tokens,
        )
        assert reported.patches == wanted.patches
