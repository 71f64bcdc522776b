"""Callbacks: user code at the steps, evaluations and checkpoints of a training run, and the TensorBoard log."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeloom.errors import InputError
from pipeloom.runtime import user_code
from pipeloom.training.record import Row, Summary

if TYPE_CHECKING:
    from pipeloom.runtime.train.evaluate import EvaluationResult, SeparateRandomness


class Callback:
    """Receives the events of a training run; override the methods that you need.

    Methods are called on rank 0, in its process, between iterations, so all ranks wait for them. An exception ends the
    run with one line. A callback is pickled on its way to rank 0, which has its own copy.
    """

    def on_step(self, row: Row) -> None:
        """Called after an iteration, with its row of ``history.jsonl``."""

    def on_evaluation(self, evaluated: EvaluationResult) -> None:
        """Called after an evaluation."""

    def on_checkpoint(self, iteration: int, path: Path) -> None:
        """Called when a checkpoint is complete, with the next iteration and the checkpoint's folder."""

    def on_end(self, summary: Summary) -> None:
        """Called at the end, with the summary of the run."""


class Callbacks:
    """Calls all callbacks of a run, one after the other.

    They draw from ``randomness``, since they run on rank 0 only: numbers from the generators of training would give it
    another order of the data than other ranks.
    """

    def __init__(self, callbacks: Sequence[object], randomness: SeparateRandomness) -> None:
        checked: list[Callback] = []
        for number, callback in enumerate(callbacks):
            if not isinstance(callback, Callback):
                what = type(callback).__name__
                raise InputError(f"callbacks[{number}]", f"is a {what}", "give objects of classes of pipeloom.Callback")
            checked.append(callback)
        self._callbacks, self._randomness = tuple(checked), randomness

    def call(self, event: str, *arguments: Any) -> None:
        """Call one method of each callback; raise `InputError` with its name if one raises."""
        for callback in self._callbacks:
            draws = not isinstance(callback, TensorBoardLog)
            with (
                self._randomness.used() if draws else nullcontext(),
                user_code(f"callback {type(callback).__name__}.{event}"),
            ):
                getattr(callback, event)(*arguments)


_SCALARS = {
    "loss": "loss/training",
    "gradient_norm": "loss/gradient_norm",
    "learning_rate": "loss/learning_rate",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "step_s": "speed/step_s",
    "planned_s": "speed/planned_s",
    "measured_s": "speed/measured_s",
    "planned_bubble_share": "schedule/planned_bubble_share",
    "measured_bubble_share": "schedule/measured_bubble_share",
    "gap": "schedule/gap",
    "lead_s": "schedule/lead_s",
}
"""TensorBoard names of a row's fields."""


def check_tensorboard() -> None:
    """Raise `InputError` if the package that writes event files is missing."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise InputError(
            "log.tensorboard", f"needs a package that is missing ({error})", "install pipeloom[tensorboard]"
        ) from error


class TensorBoardLog(Callback):
    """Writes event files.

    TensorBoard does not show what earlier starts wrote about ``first_iteration`` and later ones.
    """

    def __init__(self, folder: Path, first_iteration: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_iteration)

    def on_step(self, row: Row) -> None:
        """Write the numbers of an iteration."""
        for field, name in _SCALARS.items():
            value = getattr(row, field)
            if value is not None:
                self._writer.add_scalar(name, value, row.iteration)
        self._writer.flush()

    def on_evaluation(self, evaluated: EvaluationResult) -> None:
        """Write the loss of an evaluation at the iteration before it."""
        self._writer.add_scalar("loss/evaluation", evaluated.loss, evaluated.iteration - 1)
        self._writer.flush()

    def on_end(self, summary: Summary) -> None:  # noqa: ARG002
        """Close the file."""
        self._writer.close()
