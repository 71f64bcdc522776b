"""Saver: decides when training is saved, completes saves, and finds where training resumes."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeloom.errors import ExecutionError, InputError, PipeloomError
from pipeloom.runtime.checkpoint.ema import Averages
from pipeloom.runtime.checkpoint.resume import Checkpoints, PendingCheckpoint, TrainerState
from pipeloom.runtime.data.prefetch import next_samples
from pipeloom.runtime.execute.executor import Executor
from pipeloom.runtime.execute.result import NotFiniteError
from pipeloom.runtime.launch.coordination import together
from pipeloom.runtime.model.model import user_code

_LOG = logging.getLogger(__name__)
_MOST_S = 60.0
"""Most seconds that a rank waits for the files of a checkpoint after an error that other ranks may not have."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Checkpoints of a `Trainer`, and the functions that it calls with each."""

    checkpoints: Checkpoints | None = None
    """Where checkpoints are saved, and from where `Trainer.resume` loads them. None saves none."""
    on_checkpoint: Callable[[int, Path], None] | None = None
    """Called after a checkpoint with the iteration to resume at and the folder."""
    ends_after: Callable[[int], bool] | None = None
    """Called on all ranks together when a checkpoint was started, with the iteration to resume at. If it returns True,
    `Trainer.run` completes the checkpoint and ends, so that another trainer can continue with another layout."""
    record: Sequence[Path] = ()
    """Files in which rank 0 keeps the run's history. Hosts that do not share them receive them with each checkpoint."""
    resumes: bool = False
    """Whether `Trainer.resume` will find a checkpoint. Weights of layers on ``meta`` are then not read from the model's
    folder."""


@dataclass
class Saver:
    """Saves one training run. All ranks use it alike."""

    saving: Saving
    executor: Executor
    optimizer: torch.optim.Optimizer | None
    averages: Averages | None
    run_id: str = field(init=False, default_factory=lambda: secrets.token_hex(8))
    """Id of the run, see `TrainerState`."""
    _pending: PendingCheckpoint | None = field(init=False, default=None)
    _resumed: TrainerState | None = field(init=False, default=None)

    def load(self) -> TrainerState | None:
        """Load the newest checkpoint, see `Checkpoints.load`.

        Raises `InputError` if there is none and ``saving.resumes`` is set.
        """
        if self.saving.checkpoints is not None:
            self._resumed = self.saving.checkpoints.load(self.executor, self.optimizer, self.averages)
        if self._resumed is None and self.saving.resumes:
            raise InputError("saving.resumes", "is set, but there is no checkpoint", "leave it out")
        if self._resumed is not None:
            self.run_id = self._resumed.run
        return self._resumed

    def skip_trained(
        self, source: Iterator[Sequence[Any]], count: int, digest: Callable[[Sequence[Any], int], str]
    ) -> Iterator[Sequence[Any]]:
        """Skip ``count`` batches, see `Trainer.skip_trained`.

        ``digest`` returns the digest of a batch and its iteration.
        """
        last: Sequence[Any] | None = None
        resumed = self._resumed
        begin = 0 if resumed is None else resumed.iteration - count
        for iteration in range(begin, begin + count):
            with user_code(f"iteration {iteration}: batches"):
                last = next_samples(source, f"iteration {iteration}")
            if last is None:
                if resumed is not None and resumed.batch:
                    raise InputError(
                        "batches",
                        f"end before iteration {iteration}, but the checkpoint has {resumed.iteration} iterations",
                        "use the data of the run that wrote it, or restart",
                    )
                break
        if count and resumed is not None:
            iteration = resumed.iteration - 1
            if resumed.batch != ("" if last is None else digest(last, iteration)):
                raise InputError(
                    f"iteration {iteration}",
                    "has other samples than when it was trained before the checkpoint",
                    "use the data of the run that wrote it, or restart",
                )
        return source

    def after(self, iteration: int, state: Callable[[], TrainerState], *, is_last: bool) -> bool:
        """Begin a checkpoint after an iteration if one is due, and complete a written one. Return whether one was due.

        ``state`` returns the state to save beside tensors. The last iteration is always saved and waited for.
        """
        checkpoints = self.saving.checkpoints
        if checkpoints is None:
            return False
        if self._pending is not None and self._pending.ended:
            self.end()
        if iteration % checkpoints.every and not is_last:
            return False
        self.end()
        with together(f"iteration {iteration - 1}: saving the checkpoint"):
            self._pending = checkpoints.save(self.executor, self.optimizer, state(), self.averages, self.saving.record)
        if is_last or not checkpoints.asynchronous:
            self.end()
        return True

    def end(self) -> None:
        """Wait until the current checkpoint is complete, and call ``on_checkpoint``."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with together(f"saving the checkpoint after {pending.iteration} iterations"):
            path = pending.wait()
        if self.saving.on_checkpoint is not None:
            self.saving.on_checkpoint(pending.iteration, path)

    def end_after_error(self, error: BaseException) -> None:
        """Complete the current checkpoint as in `end`, but only log errors: ``error`` ends the run and is raised.

        After an `ExecutionError`, which is not raised on all ranks, only wait for the files. Other ranks may be lost or
        wait for this one, whose error must be raised before their timeout.
        """
        if isinstance(error, ExecutionError) and not isinstance(error, NotFiniteError):
            if self._pending is not None:
                timeout_s = self.executor.options.timeout_s
                self._pending.wait_at_most(_MOST_S if timeout_s is None else min(_MOST_S, timeout_s / 2))
            return
        try:
            self.end()
        except PipeloomError as problem:
            _LOG.error("%s", problem)

    def ends_after(self, iteration: int) -> bool:
        """Return whether the run ends at the checkpoint that was started after an iteration."""
        return self.saving.ends_after is not None and self.saving.ends_after(iteration)
