"""Saver: decides when training is saved, completes saves, and finds where training resumes."""

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
    """Checkpoints of one training run. All ranks use it alike.

    Parameters
    ----------
    checkpoints : Checkpoints or None
        None saves nothing.
    record, on_checkpoint
        See `TrainerOptions`.
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
        """Load the newest checkpoint, see `Checkpoints.load`.

        Raises `InputError` if there is none and ``must`` is set.
        """
        if self.checkpoints is not None:
            self._resumed = self.checkpoints.load(self.executor, self.optimizer, self.averages)
        if self._resumed is None and must:
            raise InputError("options.resumes", "is set, but there is no checkpoint", "leave it out")
        return self._resumed

    def skip_trained(
        self, source: Iterator[Sequence[Any]], count: int, digest: Callable[[Sequence[Any], int], str]
    ) -> Iterator[Sequence[Any]]:
        """Skip ``count`` batches, see `Trainer.skip_trained`.

        ``digest`` returns the digest of a batch and its iteration.
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
                    "has other samples than when it was trained before the checkpoint",
                    "use the data of the run that wrote it, or restart",
                )
        return source

    def after(self, iteration: int, state: Callable[[], TrainerState], *, is_last: bool) -> bool:
        """Begin a checkpoint after an iteration if one is due, and complete a written one.

        Parameters
        ----------
        state : callable
            Returns the state to save beside tensors.
        is_last : bool
            Whether this is the last iteration, which is always saved and waited for.

        Returns
        -------
        bool
            Whether a checkpoint was due.
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
        """Wait until the current checkpoint is complete, and call ``on_checkpoint``."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        with together(f"saving the checkpoint after {saving.iteration} iterations"):
            path = saving.wait()
        if self.on_checkpoint is not None:
            self.on_checkpoint(saving.iteration, path)
