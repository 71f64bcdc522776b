"""The loop around plans: groups keep their rates, evaluation changes nothing, what is resumed is exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import pipeloom as pl
from pipeloom.spec import batch_from_dicts
from tests.examples import loop_fit
from tests.examples.loop_fit import ITERATIONS

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("_double")]
DECAY = 0.7
_IN_CONFIG = ("iterations", "evaluation", "ema", "log", "timeout_s")


@pytest.fixture
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def fitted(folder: Path, model: Any = loop_fit.build_model, ranks: int = 2, **settings: Any) -> pl.FitResult:
    in_config = {name: settings.pop(name) for name in _IN_CONFIG if name in settings}
    config = pl.RunConfig(
        packing=pl.PackingSpec(20, "first_fit"),
        checkpoint=pl.CheckpointConfig(every=2, keep=9, asynchronous=settings.pop("asynchronous", False)),
        planner=pl.PlannerConfig(budget_s=0.02, deadline_s=60.0),
        **in_config,
    )
    return pl.fit(
        model,
        settings.pop("batches", loop_fit.batches),
        optimizer=loop_fit.grouped,
        # The same packings whatever was measured: dropout is by microbatch and chunk.
        layout=pl.separate(loop_fit.build_model().spec, ranks, {}, lambda _module, _layer: 1.0),
        folder=folder,
        config=config,
        **settings,
    )


@dataclass
class Undivided:
    """The same training in one process."""

    model: pl.Model
    losses: list[float]
    evaluated: dict[int, float]
    averages: dict[str, torch.Tensor]
    rates: list[float]


def undivided() -> Undivided:
    torch.manual_seed(0)
    model = loop_fit.build_model()
    named = [(f"lm.{i}.{n}", p) for i, x in enumerate(model.modules[0].layers) for n, p in x.named_parameters()]
    optimizer = loop_fit.grouped(named)
    scheduler = loop_fit.halving(optimizer)
    averages = {name: p.detach().clone() for name, p in named}
    found = Undivided(model, [], {}, averages, [])
    for number, samples in enumerate(loop_fit.batches(), 1):
        found.rates.append(optimizer.param_groups[0]["lr"])
        found.losses.append(pl.run_undivided(model, batch_of(samples), samples))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        for name, p in named:
            averages[name] = DECAY * averages[name] + (1 - DECAY) * p.detach()
        if number in (3, 6):
            trained = [p.detach().clone() for _, p in named]
            for name, p in named:
                p.data.copy_(averages[name])
            found.evaluated[number] = evaluated(model)
            for (_, p), weights in zip(named, trained, strict=True):
                p.data.copy_(weights)
    return found


def evaluated(model: pl.Model) -> float:
    total = count = 0.0
    for samples in loop_fit.held_out():
        targets = sum(map(model.num_targets, samples))
        total += pl.run_undivided(model, batch_of(samples), samples, backward=False) * targets
        count += targets
    return total / count


def batch_of(samples: list[Any]) -> pl.Batch:
    return batch_from_dicts([loop_fit.describe(sample) for sample in samples])


@pytest.mark.full
def test_the_loop_over_ranks_is_that_of_one_process_and_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    settings = {
        "scheduler": loop_fit.halving,
        "ema": pl.EmaConfig(DECAY),
        "evaluate_on": loop_fit.held_out,
        "evaluation": pl.EvaluationConfig(3, weights="ema"),
        "callbacks": (loop_fit.Recorder(tmp_path / "told"),),
        "log": pl.LogConfig(peak_flops=1e12, tensorboard=True),
    }
    part = fitted(tmp_path / "run", iterations=4, **settings)
    assert part.losses == pytest.approx(undivided().losses[:4], rel=1e-9)
    # On three ranks, whose groups are others.
    result = fitted(tmp_path / "run", ranks=3, iterations=ITERATIONS, resume=True, **settings)
    wanted = undivided()
    assert result.losses == pytest.approx(wanted.losses, rel=1e-9)
    # The first start evaluated at its own end too.
    assert [iteration for iteration, _ in result.summary.evaluations] == [3, 4, 6]
    found = dict(result.summary.evaluations)
    assert {i: found[i] for i in (3, 6)} == pytest.approx(wanted.evaluated, rel=1e-9)
    assert [row.learning_rate for row in result.iterations] == pytest.approx(wanted.rates)
    for weights, tensors in (("trained", dict(layers(wanted.model))), ("ema", wanted.averages)):
        trained = loop_fit.build_model()
        pl.load_weights(result.checkpoint, trained, weights=weights)  # type: ignore[arg-type]
        for name, tensor in layers(trained):
            torch.testing.assert_close(tensor, tensors[name], rtol=1e-7, atol=1e-9)
    for row in result.iterations:
        assert row.tokens_per_s is not None
        assert row.mfu is not None
        assert 0 < row.mfu < 1
        assert row.num_tokens == sum(len(words) for _, words in list(loop_fit.batches())[row.iteration])
    reported = (tmp_path / "told").read_text().splitlines()
    assert reported[:6] == ["step 0 0.02", "step 1 0.02", "checkpoint 2", "step 2 0.01", "evaluation 3", "step 3 0.01"]
    assert reported[6:] == [
        *("checkpoint 4", "evaluation 4", "end 4", "step 4 0.005", "step 5 0.005", "checkpoint 6", "evaluation 6"),
        "end 6",
    ]
    lines = (result.folder / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["weights"] for line in lines] == ["ema"] * 3
    assert_board(result.folder / "tensorboard", result)


def layers(model: pl.Model) -> list[tuple[str, torch.Tensor]]:
    return [(f"lm.{i}.{n}", p.detach()) for i, x in enumerate(model.modules[0].layers) for n, p in x.named_parameters()]


def assert_board(folder: Path, result: pl.FitResult) -> None:
    """TensorBoard's own reader finds the losses."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    assert [event.value for event in board.Scalars("loss/training")] == pytest.approx(result.losses, rel=1e-5)
    assert [event.step for event in board.Scalars("loss/evaluation")] == [2, 3, 5]


@pytest.mark.full
def test_a_run_with_evaluation_has_the_losses_of_one_without(tmp_path: Path) -> None:
    without = fitted(tmp_path / "without", loop_fit.build_dropping)
    settings: dict[str, Any] = {"evaluate_on": loop_fit.held_out, "evaluation": pl.EvaluationConfig(1)}
    found = fitted(tmp_path / "with", loop_fit.build_dropping, **settings)
    assert found.losses == without.losses
    # Without dropout, which the training has.
    trained = loop_fit.build_dropping()
    pl.load_weights(found.checkpoint, trained)
    for layer in trained.modules[0].layers:
        layer.eval()
    assert found.summary.evaluations[-1][1] == pytest.approx(evaluated(trained), rel=1e-9)


def test_what_a_callback_raises_ends_the_run_with_one_line(tmp_path: Path) -> None:
    # Weights in bfloat16, which train and are saved.
    torch.set_default_dtype(torch.bfloat16)
    callbacks = (loop_fit.Recorder(tmp_path / "told", fails=True),)
    message = r"^rank 0: callback Recorder.on_checkpoint: raised ValueError: no more of this;"
    with pytest.raises(pl.ExecutionError, match=message):
        fitted(tmp_path / "run", callbacks=callbacks, evaluate_on=loop_fit.held_out, ema=pl.EmaConfig())
    assert (tmp_path / "told").read_text().splitlines() == ["step 0 0.02", "step 1 0.02"]
    trained = loop_fit.build_model()
    pl.load_weights(tmp_path / "run" / "checkpoints" / "step-00000002", trained, weights="ema")
    assert {tensor.dtype for _, tensor in layers(trained)} == {torch.bfloat16}


def test_what_a_callback_draws_does_not_change_the_order_of_the_data(tmp_path: Path) -> None:
    result = fitted(tmp_path / "run", batches=loop_fit.shuffled, callbacks=(loop_fit.Drawing(),))
    assert len(result.losses) == 4


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (loop_fit.build_model, {"evaluate_on": loop_fit.held_out_long}, "evaluation batch 0: .*80"),
        (loop_fit.build_model, {"callbacks": (loop_fit.Stopping(),)}, "stopped at 2"),
        (loop_fit.build_diverging, {}, "the evaluation after 2 iterations: the loss is inf"),
    ],
    ids=["sample", "callback", "loss"],
)
def test_an_evaluation_that_fails_does_not_cost_the_checkpoint(
    tmp_path: Path, model: Any, settings: dict[str, Any], message: str
) -> None:
    usual: dict[str, Any] = {
        "evaluate_on": loop_fit.held_out,
        "evaluation": pl.EvaluationConfig(2),
        # Every evaluation but the first halves the rates.
        "scheduler": partial(ReduceLROnPlateau, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"),
        "asynchronous": True,
    }
    with pytest.raises(pl.ExecutionError, match=message):
        fitted(tmp_path / "run", model, **usual | settings)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    result = fitted(tmp_path / "run", resume=True, **usual)
    assert [iteration for iteration, _ in result.summary.evaluations] == [2, 4, 6]
    assert [row.learning_rate for row in result.iterations] == pytest.approx([0.02] * 4 + [0.01] * 2)


@pytest.mark.full
def test_an_evaluation_that_fails_on_one_rank_does_not_cost_a_checkpoint_that_takes_long(tmp_path: Path) -> None:
    evaluation = {"evaluate_on": loop_fit.held_out_long, "evaluation": pl.EvaluationConfig(2)}
    with pytest.raises(pl.ExecutionError, match=r"evaluation batch 0: .*80") as raised:
        fitted(tmp_path / "run", loop_fit.build_saving_slowly, timeout_s=5.0, asynchronous=True, **evaluation)
    assert raised.value.is_permanent
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.full
def test_ranks_wait_for_callbacks_longer_than_for_one_another(tmp_path: Path) -> None:
    evaluation = {"evaluate_on": loop_fit.held_out, "evaluation": pl.EvaluationConfig(3)}
    result = fitted(tmp_path / "run", timeout_s=5.0, callbacks=(loop_fit.Slow(8.0),), **evaluation)
    assert len(result.losses) == ITERATIONS


def test_what_is_asked_for_in_vain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pl.InputError, match="eval_batches: is missing; add it, or omit"):
        fitted(tmp_path / "run", evaluation=pl.EvaluationConfig(2))
    with pytest.raises(pl.InputError, match="'cosine' needs the length of the run, which is unknown; set "):
        pl.fit(loop_fit.build_model, loop_fit.batches, config=pl.RunConfig(scheduler=pl.SchedulerConfig()))
    with pytest.raises(pl.InputError, match="warmup_iterations: is 3, but the task makes its own scheduler"):
        pl.fit(
            loop_fit.build_model,
            loop_fit.batches,
            scheduler=partial(StepLR, step_size=1),
            folder=tmp_path / "run",
            config=pl.RunConfig(optimizer=pl.OptimizerConfig(warmup_iterations=3)),
        )
    with pytest.raises(pl.InputError, match=r"evaluation.weights: is 'ema', but no average is kept"):
        fitted(tmp_path / "run", evaluate_on=loop_fit.held_out, evaluation=pl.EvaluationConfig(2, weights="ema"))
