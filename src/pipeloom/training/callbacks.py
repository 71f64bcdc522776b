"""Callback: a user's own code at the steps, evaluations and checkpoints of a training run."""

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
    """What is told of a run while it lasts; override what you want to know.

    Methods are called on rank 0, in its process, between iterations: all ranks wait for them. What they raise ends the
    run with one line. A callback is pickled on its way to rank 0, which has a copy of its own.
    """

    def on_step(self, row: Row) -> None:
        """Called after an iteration, with what ``history.jsonl`` has of it."""

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Called after an evaluation."""

    def on_checkpoint(self, iteration: int, path: Path) -> None:
        """Called once a checkpoint is whole: with the iteration to go on with, and its folder."""

    def on_end(self, summary: Summary) -> None:
        """Called at the end, with what the run came to."""


class Callbacks:
    """All callbacks of a run, one after the other.

    Parameters
    ----------
    callbacks : sequence of Callback
    """

    def __init__(self, callbacks: Sequence[object]) -> None:
        found: list[Callback] = []
        for number, callback in enumerate(callbacks):
            if not isinstance(callback, Callback):
                what = type(callback).__name__
                raise InputError(f"callbacks[{number}]", f"is a {what}", "give objects of classes of pipeloom.Callback")
            found.append(callback)
        self._callbacks = tuple(found)

    def tell(self, event: str, *arguments: Any) -> None:
        """Call one method of each.

        Raises
        ------
        InputError
            Naming the callback that raised.
        """
        for callback in self._callbacks:
            with user_code(f"callback {type(callback).__name__}.{event}"):
                getattr(callback, event)(*arguments)
