"""What callbacks draw, how ranks wait for them, and what the TensorBoard log shows."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import pipeloom as pl
from pipeloom.runtime.launch.processes import launch
from pipeloom.runtime.train.evaluate import SeparateRandomness, preserve_random_state, seed_generators
from pipeloom.training.callbacks import Callbacks, TensorBoardLog
from pipeloom.training.job import Job
from pipeloom.training.rank import EventHandler, _catching_up
from pipeloom.training.record import Recorder
from pipeloom.training.task import Task
from tests.cli.test_record import Reports


def draw() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.random())]  # noqa: NPY002


class Drawing(pl.Callback):
    """Keeps what it draws."""

    def __init__(self, fails: bool = False) -> None:
        self.drawn: list[list[float]] = []
        self.fails = fails

    def on_step(self, row: Any) -> None:
        self.drawn.append(draw())
        if self.fails:
            raise ValueError("no more of this")


def test_what_callbacks_draw_changes_no_other_random_numbers() -> None:
    with preserve_random_state(torch.device("cpu")):
        seed_generators(5)
        callback, wanted = Drawing(), [draw() for _ in range(2)]
        seed_generators(5)
        callbacks = Callbacks([callback, Drawing(fails=True)], SeparateRandomness(torch.device("cpu")))
        for each in wanted:
            with pytest.raises(pl.InputError, match="no more of this"):
                callbacks.call("on_step", None)
            assert draw() == each
    # Every call draws other numbers.
    assert callback.drawn[0] != callback.drawn[1]


def test_making_callbacks_changes_no_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[EventHandler.__module__], "group_device", lambda: torch.device("cpu"))
    task = Task(pl.Model, list, callbacks=lambda: [Drawing()][: len(draw())])
    with preserve_random_state(torch.device("cpu")):
        seed_generators(5)
        wanted = draw()
        seed_generators(5)
        EventHandler(Job(pl.RunConfig(), task, tmp_path), 0, lambda _report: None)
        assert draw() == wanted


def catch_up_in_turn(folder: Path) -> float:
    """Run on ranks, of which only rank 0 has callbacks: wait for them, then add up ones."""
    callbacks = (Drawing(),) if dist.get_rank() == 0 else ()
    catch_up = _catching_up(Job(pl.RunConfig(), Task(pl.Model, list, callbacks=callbacks), folder))
    total = torch.ones(())
    for _ in range(2):
        catch_up()
        dist.all_reduce(total)
    return float(total)


@pytest.mark.ranks
def test_only_rank_0_needs_to_have_callbacks(tmp_path: Path) -> None:
    assert launch(catch_up_in_turn, 2, tmp_path, timeout_s=10.0) == [4.0, 4.0]


def test_tensorboard_does_not_show_a_lost_start(tmp_path: Path) -> None:
    reports = Reports()
    for loss in (9.0, 1.0):
        log, recorder = TensorBoardLog(tmp_path / "tensorboard"), Recorder(tmp_path)
        for iteration in range(2):
            log.on_step(recorder.add(reports(iteration, loss=loss)))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss/training")] == [(0, 1.0), (1, 1.0)]
