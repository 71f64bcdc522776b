"""Whatever may be combined trains as one process would, every iteration by a plan made for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeloom.plan import from_text
from pipeloom.runtime.launch.processes import launch
from pipeloom.training import TrainingRun
from tests.warm import begin_warm

from . import task
from .covering import FACTORS, Row, covering_set
from .rows import PROCESSES, prepare, run_of, train_rows

pytestmark = pytest.mark.ranks

BOUND = 1e-10


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many planners would take minutes to start; what starts from nothing is tried elsewhere."""
    begin_warm(monkeypatch)


def assert_trained(rows: list[Row], folder: Path) -> list[TrainingRun]:
    """Train all rows, and see that each has the gradients of one process and fresh plans, within its memory."""
    runs = [prepare(run_of(row, folder)) for row in rows]
    found = launch(train_rows, PROCESSES, list(runs), timeout_s=120.0)[0]
    for run, summary in zip(runs, found, strict=True):
        assert summary is not None
        assert summary.evaluation["difference"] <= BOUND, run.config.name
        assert summary.fallback_iterations == {}, run.config.name
        assert summary.plans_fresh == task.ITERATIONS
    return runs


def actions_of(run: TrainingRun) -> set[tuple[str, str]]:
    """Verbs and strategies of all plans."""
    plans = [from_text(path.read_text()) for path in sorted((run.folder / "plans").iterdir())]
    return {(action.verb, action.strategy) for plan in plans for actions in plan.ranks for action in actions}


def test_what_is_not_trained_alike_is_distinguished_from_what_is() -> None:
    model = task.build_model(task.SEED)
    assert task.evaluate(model)["difference"] == 1.0
    task.train_undivided(model)
    assert task.evaluate(model)["difference"] == 0.0
    with torch.no_grad():
        task.weights(model)[-1].view(-1)[0] += 1e-9
    assert task.evaluate(model)["difference"] > BOUND


def test_one_row(tmp_path: Path) -> None:
    """Of choices that have the least to do with one another.

    Microbatches are as few as may be: of those that are planned, by measured times, some are so small that all fits.
    """
    row = {"policy": "balanced", "layout": "separate", "strategies": "chosen", "split": "whole"}
    (run,) = assert_trained([row | {"parallel": "none", "encoder": "frozen", "early": "default"}], tmp_path)
    actions = actions_of(run)
    assert {word for verb, word in actions if verb == "F"} > {"keep"}


@pytest.mark.full
@pytest.mark.parametrize("parallel", FACTORS["parallel"])
def test_the_covering_set(parallel: str, tmp_path: Path) -> None:
    rows = [row for row in covering_set() if row["parallel"] == parallel]
    runs = assert_trained(rows, tmp_path)
    # Some find packings in which all fits, by measured times. Shards and shares may leave room for it in all of them.
    chosen = [run for row, run in zip(rows, runs, strict=True) if row["strategies"] == "chosen"]
    lean = {word for run in chosen for verb, word in actions_of(run) if verb == "F"} > {"keep"}
    assert lean or parallel in ("dp", "fsdp", "tp")
    # Replicas have too few microbatches for it to pay.
    halved = any(verb == "W" for run in runs for verb, _ in actions_of(run))
    assert halved or parallel in ("dp", "fsdp")
