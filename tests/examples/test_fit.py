"""`pl.fit` trains as one process would, from a short script, and says where what it leaves lies."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import pipeloom as pl
from pipeloom.spec import batch_from_dicts
from pipeloom.training import PlannerConfig, Task
from pipeloom.training.one_call import _build, _portable
from tests.examples import loop_fit
from tests.examples.on_ranks import EXAMPLES
from tests.runtime import streaming_fit

sys.path.append(str(EXAMPLES))

import fit as example

ITERATIONS = 3
LAYOUT = pl.separate(example.build_model().spec, 3, {}, lambda _module, _layer: 1.0)


@pytest.fixture
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def undivided() -> tuple[pl.Model, list[float]]:
    """The same training in one process: the trained model, and the losses."""
    torch.manual_seed(0)
    model = example.build_model()
    parameters = [p for module in model.modules for layer in module.layers for p in layer.parameters()]
    optimizer, losses = torch.optim.AdamW(parameters), []
    for _, samples in zip(range(ITERATIONS), example.batches(), strict=False):
        batch = batch_from_dicts([example.describe(sample) for sample in samples])
        losses.append(pl.run_undivided(model, batch, samples))
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


@pytest.mark.ranks
@pytest.mark.usefixtures("_double")
def test_losses_and_weights_are_those_of_one_process(tmp_path: Path) -> None:
    config = pl.RunConfig(iterations=ITERATIONS, planner=PlannerConfig(budget_s=0.02, deadline_s=60.0))
    folder = tmp_path / "run"
    result = pl.fit(
        example.build_model, example.batches, ranks=2, describe=example.describe, folder=folder, config=config
    )
    wanted, losses = undivided()
    assert result.losses == pytest.approx(losses, rel=1e-9)
    assert len(result.planned_s) == len(result.measured_s) == ITERATIONS
    assert result.summary.plans_fresh == ITERATIONS
    trained = example.build_model()
    pl.load_weights(result.checkpoint, trained)
    for layer, one in zip(trained.module("lm").layers, wanted.module("lm").layers, strict=True):
        for found, parameter in zip(layer.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(found, parameter, rtol=1e-7, atol=1e-9)
    assert (result.folder / "timeline.html").exists()


def test_objects_are_given_to_processes_as_bytes_of_which_each_makes_its_own() -> None:
    layer = torch.nn.Linear(2, 2)
    data = _portable([layer], "model")
    assert isinstance(data, bytes)
    (made,) = _build(data, seed=1)
    assert torch.equal(made.weight, layer.weight)
    assert made.weight.data_ptr() != layer.weight.data_ptr()


def test_what_no_other_process_can_have_is_refused_with_its_name() -> None:
    with pytest.raises(pl.InputError, match=r"model: cannot be sent to other processes .*; pass a function"):
        pl.fit(lambda: example.build_model(), example.batches, describe=example.describe)
    with pytest.raises(pl.InputError, match="batches: cannot be sent to other processes"):
        pl.fit(example.build_model, example.batches(), describe=example.describe)
    with pytest.raises(pl.InputError, match="folder: is missing, so there is no run to resume"):
        pl.fit(example.build_model, example.batches, describe=example.describe, resume=True)
    with pytest.raises(pl.InputError, match="ranks: is 2, but the layout has 3"):
        pl.fit(example.build_model, example.batches, ranks=2, layout=LAYOUT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"ranks": 2, "config": pl.RunConfig(layout=pl.LayoutConfig(4, "chosen"))},
            "ranks: is 2, but config.layout.ranks is 4; omit ranks",
        ),
        (
            {"layout": LAYOUT, "config": pl.RunConfig(layout=pl.LayoutConfig(3))},
            "layout: is an argument, but config.layout is set too; omit one of them",
        ),
        (
            {"scheduler": StepLR, "config": pl.RunConfig(scheduler=pl.SchedulerConfig("constant"))},
            "scheduler: is an argument, but config.scheduler is set too; omit one of them",
        ),
        ({"config": pl.RunConfig(task="task.py")}, "config.task: is set, but fit has arguments for model and batches"),
        ({"config": pl.RunConfig(model={"layers": 2})}, "config.model: is set"),
    ],
)
def test_a_config_that_contradicts_an_argument_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(pl.InputError, match=message):
        pl.fit(example.build_model, example.batches, describe=example.describe, **arguments)


@pytest.mark.parametrize("batches", [[], list], ids=["list", "function"])
def test_no_batches_are_refused(batches: Any, tmp_path: Path) -> None:
    with pytest.raises(pl.InputError, match="batches: has none; give at least one batch"):
        pl.fit(example.build_model, batches, ranks=2, describe=example.describe, folder=tmp_path / "run")


@pytest.mark.ranks
def test_a_loader_without_a_length_is_trained_to_its_end(tmp_path: Path) -> None:
    loader = DataLoader(loop_fit.Stream(ITERATIONS), batch_size=6, collate_fn=list)
    config = pl.RunConfig(planner=PlannerConfig(budget_s=0.02, deadline_s=60.0))
    result = pl.fit(loop_fit.build_model, loader, ranks=2, folder=tmp_path / "run", config=config)
    assert [row.iteration for row in result.iterations] == list(range(ITERATIONS))


def test_a_task_travels_with_its_functions() -> None:
    task = Task(example.build_model, example.batches, example.describe, optimizer=partial(torch.optim.SGD, lr=0.1))
    again = pickle.loads(pickle.dumps(task))
    assert again == Task(task.build_model, task.batches, task.describe, None, again.optimizer)
    assert again.optimizer.keywords == {"lr": 0.1}


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.usefixtures("_double")
def test_a_model_with_streams_and_no_shapes_is_trained_as_by_one_process(tmp_path: Path) -> None:
    planner = PlannerConfig(budget_s=0.02, deadline_s=60.0)
    result = pl.fit(
        streaming_fit.build_model,
        streaming_fit.batches,
        ranks=2,
        describe=streaming_fit.describe,
        folder=tmp_path / "run",
        config=pl.RunConfig(iterations=streaming_fit.ITERATIONS, planner=planner),
    )
    bare = streaming_fit.build_model()
    batches = list(streaming_fit.batches())
    described = [batch_from_dicts([streaming_fit.describe(d) for d in documents]) for documents in batches]
    model = pl.find_shapes(bare, batches[0], described[0].samples)
    optimizer = torch.optim.AdamW([p for m in model.modules for layer in m.layers for p in layer.parameters()])
    losses = []
    for documents, batch in zip(batches, described, strict=True):
        losses.append(pl.run_undivided(model, batch, documents))
        optimizer.step()
        optimizer.zero_grad()
    assert result.losses == pytest.approx(losses, rel=1e-9)
    assert result.summary.plans_fresh == streaming_fit.ITERATIONS
