from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeloom.errors import InputError
from pipeloom.runtime import Executor, ThreadHub, launch, load_checkpoint, save_checkpoint

from .cases import Run, random_run
from .on_ranks import train_save_resume


def executor_of(run: Run) -> Executor:
    return Executor(run.model, run.case.layout, 0, ThreadHub().transport(0))


def test_training_resumes_in_another_layout_with_the_same_losses(tmp_path: Path) -> None:
    (first, again), (second, _) = launch(train_save_resume, 2, 12, str(tmp_path), timeout_s=60.0)
    losses = [mine + theirs for mine, theirs in zip(first, second, strict=True)]
    assert len(losses) == 6
    assert losses[0] != pytest.approx(losses[3], rel=1e-3)
    assert again == pytest.approx(losses[3:], rel=1e-12)


def test_what_is_no_checkpoint_of_this_model_is_refused(tmp_path: Path) -> None:
    run = random_run(1, 1)
    with pytest.raises(InputError, match="no whole checkpoint"):
        load_checkpoint(tmp_path, executor_of(run), None)
    save_checkpoint(tmp_path / "a", executor_of(run), None, 7)
    assert load_checkpoint(tmp_path / "a", executor_of(run), None) == 7
    stranger = next(r for r in map(random_run, range(2, 50), [1] * 48) if names(r) - names(run))
    with pytest.raises(InputError, match="is missing, the model wants"):
        load_checkpoint(tmp_path / "a", executor_of(stranger), None)
    # Same names, another width.
    layer = run.model.modules[0].layers[0]
    grown = {name: torch.zeros(2, *p.shape) for name, p in layer.named_parameters()}
    for name, value in grown.items():
        *path, last = name.split(".")
        setattr(layer.get_submodule(".".join(path)), last, torch.nn.Parameter(value))
    with pytest.raises(InputError, match="has shape"):
        load_checkpoint(tmp_path / "a", executor_of(run), None)


def names(run: Run) -> set[str]:
    return {name for name, _ in executor_of(run).named_parameters()}
