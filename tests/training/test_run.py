"""What a run checks before its ranks start, and what it reads of an earlier start."""

from __future__ import annotations

from pathlib import Path

import pytest

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.training import CheckpointConfig, Task


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
