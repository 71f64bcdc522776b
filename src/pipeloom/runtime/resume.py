"""Checkpoints of a training run: written every so often, and the newest whole one found again."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from pipeloom.cost import Correction
from pipeloom.errors import ExecutionError, InputError
from pipeloom.runtime.checkpoint import load_checkpoint, save_checkpoint
from pipeloom.runtime.coordination import first_says
from pipeloom.runtime.ema import Averages
from pipeloom.runtime.executor import Executor
from pipeloom.spec import Batch

STATE = "trainer.json"
"""File of a checkpoint with its `TrainerState`."""
_WHOLE = re.compile(r"step-(\d+)")


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer knows beside weights, optimiser state and random numbers."""

    iteration: int
    """The next one to run."""
    batch: str
    """Fingerprint of the batch before it, to see that the data is the same when training goes on."""
    layout: str
    num_measured: int = 0
    """Iterations that the calibration has learned from."""
    correction: Correction = Correction()
    evaluations: tuple[tuple[int, float], ...] = ()
    """Of every evaluation before, after how many iterations it was made, and the loss."""
    origin: str = ""
    """Where the model came from before it was trained, see `pipeloom.runtime.pretrained.Pretrained`."""
    format: str = "pipeloom.trainer/1"


def fingerprint(batch: Batch) -> str:
    """A batch as its samples' ids and sizes, in few letters; the iteration is no part of it."""
    content = msgspec.json.encode(msgspec.structs.replace(batch, iteration=0))
    return hashlib.blake2b(content, digest_size=12).hexdigest()


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often training is saved. All ranks read and write one folder.

    A checkpoint is written under another name and gets its own once everything is there, so that whatever happens
    meanwhile, a folder ``step-N`` is whole.

    Parameters
    ----------
    folder : Path
        Holds one folder ``step-N`` for each kept checkpoint; N is the iteration to go on with.
    every : int
        Iterations from one to the next; the end of a run is always saved.
    keep : int
        How many of the newest are kept.
    """

    folder: Path
    every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        """Refuse what never saves."""
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise InputError(f"checkpoint.{name}", f"{getattr(self, name)} is below 1")

    def steps(self) -> list[int]:
        """Iterations with which the whole checkpoints go on, oldest first."""
        if not self.folder.is_dir():
            return []
        found = (_WHOLE.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match is not None)

    def newest(self) -> Path | None:
        """Folder of the newest whole checkpoint; None where there is none."""
        return next((self._path(step) for step in reversed(self.steps())), None)

    def save(
        self,
        executor: Executor,
        optimizer: torch.optim.Optimizer | None,
        state: TrainerState,
        averages: Averages | None = None,
    ) -> Path:
        """Write a checkpoint, then drop those that are too old; all ranks call it together.

        Returns
        -------
        Path
            Its folder.

        Raises
        ------
        InputError
            When the folder cannot be written.
        """
        target, rank = self._path(state.iteration), dist.get_rank()
        partial = target.with_name(f"{target.name}.partial")
        if rank == 0:
            self._attempt(lambda: _make_empty(partial))
        dist.barrier()
        self._write(partial, executor, optimizer, state.iteration, averages)
        contents = {
            f"{name}-{rank}": generator.get_state().numpy().tobytes()
            for name, generator in _generators(executor.device).items()
        }
        if rank == 0:
            contents[STATE] = msgspec.json.encode(state)
            if executor.model.pretrained is not None:
                contents |= {name: text.encode() for name, text in executor.model.pretrained.kept().items()}
        self._attempt(lambda: _write_files(partial, rank, contents))
        dist.barrier()
        if rank == 0:
            # A checkpoint of the same iteration can only be of this run's earlier life: the same content.
            _remove(target)
            self._attempt(lambda: partial.rename(target))
            for step in self.steps()[: -self.keep]:
                _remove(self._path(step))
        dist.barrier()
        return target

    def load(
        self, executor: Executor, optimizer: torch.optim.Optimizer | None, averages: Averages | None = None
    ) -> TrainerState | None:
        """Read the newest whole checkpoint, None where there is none; all ranks call it together.

        Raises
        ------
        InputError
            When it is of another model, or damaged.
        """
        # One rank decides: another may see a folder a moment later.
        newest = first_says((self.steps()[-1:] or [-1])[0])
        if newest < 0:
            return None
        from pipeloom.runtime.checkpoint_files import check_digests  # slow to import, and seldom needed

        path = self._path(newest)
        load_checkpoint(path, executor, optimizer, averages=averages)
        check_digests(path, [STATE])
        try:
            state = msgspec.json.decode((path / STATE).read_bytes(), type=TrainerState)
        except (OSError, msgspec.MsgspecError) as error:
            raise InputError(str(path / STATE), f"cannot be read ({error})", "remove this checkpoint") from error
        for name, generator in _generators(executor.device).items():
            saved = path / f"{name}-{dist.get_rank()}"
            # In another layout other layers draw the numbers; then there is nothing to go on with.
            if state.layout == executor.layout.digest and saved.exists():
                check_digests(path, [saved.name])
                generator.set_state(torch.frombuffer(bytearray(saved.read_bytes()), dtype=torch.uint8))
        return state

    def clear(self) -> None:
        """Remove all checkpoints."""
        for step in self.steps():
            _remove(self._path(step))

    def _path(self, iteration: int) -> Path:
        return self.folder / f"step-{iteration:08d}"

    def _write(
        self,
        path: Path,
        executor: Executor,
        optimizer: torch.optim.Optimizer | None,
        iteration: int,
        averages: Averages | None,
    ) -> None:
        from torch.distributed.checkpoint.api import CheckpointException  # slow to import, and seldom needed

        try:
            save_checkpoint(path, executor, optimizer, iteration, averages=averages)
        except CheckpointException as error:  # a BaseException, which no caller would expect
            raise ExecutionError(f"checkpoint {path} cannot be written: {error}") from error

    def _attempt(self, write: Callable[..., object], *arguments: object) -> None:
        try:
            write(*arguments)
        except OSError as error:
            raise InputError(
                f"checkpoint folder {self.folder}",
                f"cannot be written ({error.strerror})",
                "make room, or give another checkpoint.path",
            ) from error


def _generators(device: torch.device) -> dict[str, torch.Generator]:
    """Random generators whose states are saved: the processor's, and the GPU's where one computes."""
    found = {"random": torch.default_generator}
    if device.type == "cuda":
        found["random-cuda"] = torch.cuda.default_generators[device.index or 0]
    return found


def _write_files(folder: Path, rank: int, contents: dict[str, bytes]) -> None:
    """Write what a rank saves beside tensors, and the digests of it."""
    from pipeloom.runtime.checkpoint_files import write_digests  # slow to import, and seldom needed

    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    write_digests(folder, f"beside-{rank}", contents)


def _make_empty(path: Path) -> None:
    _remove(path)
    path.mkdir(parents=True)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
