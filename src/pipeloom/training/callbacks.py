"""Callbacks: user code at the steps, evaluations and checkpoints of a training run, and the TensorBoard log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeloom.errors import InputError
from pipeloom.runtime import user_code
from pipeloom.training.record import Row, Summary

if TYPE_CHECKING:
    from pipeloom.runtime.train.evaluate import Evaluated


class Callback:
    """Receives the events of a training run; override the methods that you need.

    Methods are called on rank 0, in its process, between iterations, so all ranks wait for them. An exception ends the
    run with one line. A callback is pickled on its way to rank 0, which has its own copy.
    """

    def on_step(self, row: Row) -> None:
        """Called after an iteration, with its row of ``history.jsonl``."""

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Called after an evaluation."""

    def on_checkpoint(self, iteration: int, path: Path) -> None:
        """Called when a checkpoint is complete, with the next iteration and the checkpoint's folder."""

    def on_end(self, summary: Summary) -> None:
        """Called at the end, with the summary of the run."""


class Callbacks:
    """Calls all callbacks of a run, one after the other."""

    def __init__(self, callbacks: Sequence[object]) -> None:
        checked: list[Callback] = []
        for number, callback in enumerate(callbacks):
            if not isinstance(callback, Callback):
                what = type(callback).__name__
                raise InputError(f"callbacks[{number}]", f"is a {what}", "give objects of classes of pipeloom.Callback")
            checked.append(callback)
        self._callbacks = tuple(checked)

    def call(self, event: str, *arguments: Any) -> None:
        """Call one method of each callback.

        Raises
        ------
        InputError
            If a callback raises; the message names it.
        """
        for callback in self._callbacks:
            with user_code(f"callback {type(callback).__name__}.{event}"):
                getattr(callback, event)(*arguments)
