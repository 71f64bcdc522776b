"""Saver: when training is saved, how a save ends, and where training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeloom.errors import InputError
from pipeloom.runtime.checkpoint.ema import Averages
from pipeloom.runtime.checkpoint.resume import Checkpoints, Saving, TrainerState
from pipeloom.runtime.data.prefetch import next_samples
from pipeloom.runtime.execute.executor import Executor
from pipeloom.runtime.launch.coordination import together


@dataclass
class Saver:
    """The checkpoints of one training; all ranks use it alike.

    Parameters
    ----------
    checkpoints : Checkpoints or None
        None: nothing is saved.
    executor, optimizer, averages
        What is saved.
    record : sequence of Path
        Files that follow every checkpoint, see `Checkpoints.save`.
    on_checkpoint : callable or None
        Called with the iteration to go on with and the folder, once a checkpoint is whole.
    """

    checkpoints: Checkpoints | None
    executor: Executor
    optimizer: torch.optim.Optimizer | None
    averages: Averages | None = None
    record: Sequence[Path] = ()
    on_checkpoint: Callable[[int, Path], None] | None = None
    _saving: Saving | None = field(init=False, default=None)
    _resumed: TrainerState | None = field(init=False, default=None)

    def load(self, *, must: bool) -> TrainerState | None:
        """Read the newest checkpoint; None where there is none.

        Parameters
        ----------
        must : bool
            Whether there has to be one.

        Raises
        ------
        InputError
            When it is of another model, or there is none and there has to be one.
        """
        if self.checkpoints is not None:
            self._resumed = self.checkpoints.load(self.executor, self.optimizer, self.averages)
        if self._resumed is None and must:
            raise InputError("options.resumes", "is set, and there is no checkpoint", "leave it out")
        return self._resumed

    def skip_trained(
        self, source: Iterator[Sequence[Any]], count: int, digest: Callable[[Sequence[Any], int], str]
    ) -> Iterator[Sequence[Any]]:
        """Leave out so many batches, and compare the last of them with the one that was trained before the checkpoint.

        Parameters
        ----------
        digest : callable
            From a batch and its iteration, see `batch_digest`.

        Raises
        ------
        InputError
            When it is another: going on would train some samples twice and others never.
        """
        last: Sequence[Any] | None = None
        for iteration in range(count):
            last = next_samples(source, f"iteration {iteration}")
            if last is None:
                break
        if count and self._resumed is not None:
            iteration = self._resumed.iteration - 1
            if self._resumed.batch != ("" if last is None else digest(last, iteration)):
                raise InputError(
                    f"iteration {iteration}",
                    "has other samples than when it was trained, before the checkpoint",
                    "give the data of the run that wrote it, or begin anew",
                )
        return source

    def after(self, iteration: int, state: Callable[[], TrainerState], *, is_last: bool) -> bool:
        """After an iteration: begin a checkpoint where one is due, and end one that is written.

        Parameters
        ----------
        iteration : int
            How many have been trained.
        state : callable
            Says what is saved beside tensors.
        is_last : bool
            The last one is always saved, and waited for.

        Returns
        -------
        bool
            Whether one was due.
        """
        checkpoints = self.checkpoints
        if checkpoints is None:
            return False
        if self._saving is not None and self._saving.ended:
            self.end()
        if iteration % checkpoints.every and not is_last:
            return False
        self.end()
        with together(f"iteration {iteration - 1}: saving the checkpoint"):
            self._saving = checkpoints.save(self.executor, self.optimizer, state(), self.averages, self.record)
        if is_last or not checkpoints.asynchronous:
            self.end()
        return True

    def end(self) -> None:
        """Wait until the checkpoint that is being written is whole, and tell of it."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        with together(f"saving the checkpoint after {saving.iteration} iterations"):
            path = saving.wait()
        if self.on_checkpoint is not None:
            self.on_checkpoint(saving.iteration, path)
