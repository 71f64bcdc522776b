"""What callbacks draw and what the TensorBoard log shows."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeloom.training.callbacks import TensorBoardLog
from pipeloom.training.record import Recorder
from tests.cli.test_record import Reports


def test_tensorboard_does_not_show_a_lost_start(tmp_path: Path) -> None:
    reports = Reports()
    for loss in (9.0, 1.0):
        log, recorder = TensorBoardLog(tmp_path / "tensorboard"), Recorder(tmp_path)
        for iteration in range(2):
            log.on_step(recorder.add(reports(iteration, loss=loss)))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss/training")] == [(0, 1.0), (1, 1.0)]
