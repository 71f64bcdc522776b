"""What a run checks before its ranks start, and what it reads of an earlier start."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.training import CheckpointConfig, Task
from pipeloom.training.record import Recorder, RunFacts
from tests.cli.test_record import Reports


def test_fewer_iterations_than_are_trained_are_refused(tmp_path: Path) -> None:
    config = pl.RunConfig(iterations=10, checkpoint=CheckpointConfig())
    run = pl.TrainingRun(config, Task(pl.Model, list), tmp_path, tmp_path / "train.toml")
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert run._resolve_resume(resume=True)
    (tmp_path / "checkpoints" / "step-00000030").mkdir()
    message = "^iterations: is 10, but the checkpoint has 30; raise it to at least 30, or use --from-scratch$"
    with pytest.raises(InputError, match=message):
        run._resolve_resume(resume=True)
    assert not run._resolve_resume(resume=False)
    (tmp_path / "train.toml").touch()
    with pytest.raises(InputError, match=r"train.toml: iterations: is 10, but"):
        run._resolve_resume(resume=True)


def test_the_summary_of_any_evaluation_can_be_read(tmp_path: Path) -> None:
    def evaluate(_: pl.Model) -> dict[str, float]:
        return {"is_good": True, "score": 0.5, "perplexity": math.inf, "broken": math.nan}

    scores = Task(pl.Model, list, evaluate=evaluate).scores(None)  # type: ignore[arg-type]
    recorder = Recorder(tmp_path)
    recorder.add(Reports()(0, fresh=False, reason="late"))
    written = recorder.write(
        msgspec.structs.replace(recorder.summarize(RunFacts("n", 1, 1, 0, ""), 1.0), evaluation=scores)
    )
    run = pl.TrainingRun(pl.RunConfig(), Task(pl.Model, list), tmp_path)
    found = run.summary()
    assert found.evaluation == pytest.approx(
        {"is_good": 1.0, "score": 0.5, "perplexity": math.nan, "broken": math.nan}, nan_ok=True
    )
    assert msgspec.structs.replace(found, evaluation={}) == msgspec.structs.replace(written, evaluation={})
    (tmp_path / "summary.json").write_text('{"name": "n"}')
    with pytest.raises(InputError, match=r"summary.json: cannot be read \(.*; train the run to its end first"):
        run.summary()
