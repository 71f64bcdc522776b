"""Checkpoints of a training run: written every so often, and the newest whole one found again."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from pipeloom.bounds import Finite, Number
from pipeloom.cost import Correction
from pipeloom.errors import InputError
from pipeloom.runtime.checkpoint import load_checkpoint, state_tensors, write_state
from pipeloom.runtime.copies import Copies, find_copies
from pipeloom.runtime.ema import Averages
from pipeloom.runtime.executor import Executor
from pipeloom.runtime.saving import Saving
from pipeloom.spec import Batch

T = TypeVar("T")

STATE = "trainer.json"
"""File of a checkpoint with its `TrainerState`."""
_LOG = logging.getLogger(__name__)
_WHOLE = re.compile(r"step-(\d+)")


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer knows beside weights, optimiser state and random numbers."""

    iteration: Number
    """The next one to run."""
    batch: str
    """Fingerprint of the batch before it, to see that the data is the same when training goes on."""
    layout: str
    num_measured: Number = 0
    """Iterations that the calibration has learned from."""
    correction: Correction = Correction()
    evaluations: tuple[tuple[Number, Finite], ...] = ()
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
    """Where and how often training is saved.

    All ranks read and write one folder, or where hosts do not share it, each host a copy that is kept whole: a host
    that is lost takes none away.

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
    asynchronous : bool
        Write while training goes on, from copies in host memory; False: training waits.
    """

    folder: Path
    every: int = 100
    keep: int = 2
    asynchronous: bool = True

    def __post_init__(self) -> None:
        """Refuse what never saves."""
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise InputError(f"checkpoint.{name}", f"{getattr(self, name)} is below 1")

    @cached_property
    def copies(self) -> Copies:
        """Which ranks see which copy of the folder; all ranks ask for it together, at first."""
        return self._attempt(find_copies, self.folder)

    def steps(self) -> list[int]:
        """Iterations with which the whole checkpoints of this copy go on, oldest first."""
        if not self.folder.is_dir():
            return []
        found = (_WHOLE.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match is not None)

    def all_steps(self) -> list[int]:
        """The same of all copies; all ranks call it together."""
        return sorted(set().union(*self.copies.gather(self.steps())))

    def newest(self) -> Path | None:
        """Folder of the newest whole checkpoint of this copy; None where there is none."""
        return next((self._path(step) for step in reversed(self.steps())), None)

    def save(
        self,
        executor: Executor,
        optimizer: torch.optim.Optimizer | None,
        state: TrainerState,
        averages: Averages | None = None,
        record: Sequence[Path] = (),
    ) -> Saving:
        """Begin to write a checkpoint, and drop those that are too old when it is there; all ranks call it together.

        One is written at a time: wait for one before the next is begun.

        Parameters
        ----------
        executor, optimizer, state, averages
            What is saved.
        record : sequence of Path
            Files in which rank 0 writes what the run tells of itself; hosts that do not share them get them with the
            checkpoint.

        Raises
        ------
        InputError
            When the folder cannot be written.
        """
        copies, asynchronous = self.copies, self.asynchronous
        # Training changes tensors; what is written at once needs no copies.
        tensors = {
            name: tensor.detach().to("cpu", copy=True) if asynchronous else tensor
            for name, tensor in state_tensors(executor, optimizer, state.iteration, averages=averages).items()
        }
        contents = {
            f"{name}-{dist.get_rank()}": generator.get_state().numpy().tobytes()
            for name, generator in _generators(executor.device).items()
        }
        if dist.get_rank() == 0:
            contents[STATE] = msgspec.json.encode(state)
            if executor.model.pretrained is not None:
                contents |= {name: text.encode() for name, text in executor.model.pretrained.kept().items()}
        return Saving(
            state.iteration,
            lambda: self._save(copies, state.iteration, tensors, contents, record),
            asynchronous=asynchronous,
        )

    def _save(
        self,
        copies: Copies,
        iteration: int,
        tensors: Mapping[str, torch.Tensor],
        contents: dict[str, bytes],
        record: Sequence[Path],
    ) -> Path:
        target = self._path(iteration)
        beside = target.with_name(f"{target.name}.partial")
        self._attempt(copies.all_do, partial(_make_empty, beside) if copies.is_first else None)
        write_state(beside, tensors, group=copies.everyone)
        self._attempt(copies.all_do, partial(_write_files, beside, dist.get_rank(), contents))
        self._attempt(copies.complete, beside, beside)
        self._attempt(copies.all_do, partial(self._take_over, beside, target) if copies.is_first else None)
        self._attempt(copies.follow, record)
        return target

    def _take_over(self, beside: Path, target: Path) -> None:
        """Give a checkpoint that is whole its name, and drop those that are too old."""
        # One of the same iteration can only be of this run's earlier life: the same content.
        _remove(target)
        beside.rename(target)
        for step in self.steps()[: -self.keep]:
            _remove(self._path(step))

    def load(
        self, executor: Executor, optimizer: torch.optim.Optimizer | None, averages: Averages | None = None
    ) -> TrainerState | None:
        """Read the newest checkpoint that is not damaged, None where there is none; all ranks call it together.

        Raises
        ------
        InputError
            When it is of another model, or all are damaged: what is wrong with the newest.
        """
        steps = self.all_steps()
        damaged: InputError | None = None
        for step in reversed(steps):
            problem = self._damage(step)
            if problem is None:
                return self._read(step, executor, optimizer, averages)
            if dist.get_rank() == 0 and step != steps[0]:
                _LOG.warning("%s: %s; going on from an older checkpoint", problem.entity, problem.problem)
            damaged = damaged or problem
        if damaged is not None:
            raise damaged
        return None

    def _damage(self, step: int) -> InputError | None:
        """What is wrong with a checkpoint, where no copy of what is wrong is good; copies are mended from others."""
        from pipeloom.runtime.checkpoint_files import find_damage  # slow to import, and seldom needed

        copies, path = self.copies, self._path(step)
        if not all(copies.gather(path.is_dir())):
            beside = path.with_name(f"{path.name}.partial")
            lacks = copies.is_first and not path.is_dir()
            self._attempt(copies.all_do, partial(_make_empty, beside) if lacks else None)
            self._attempt(copies.complete, path, beside)
            self._attempt(copies.all_do, partial(beside.rename, path) if lacks else None)
        for is_mended in (len(copies.firsts) == 1, True):
            damage = copies.gather(find_damage(path, [STATE], copies.share))
            if not any(damage):
                return None
            if is_mended:
                break
            lacking = set().union(*(damage[rank] for rank in copies.sharers))
            self._attempt(copies.complete, path, path, lacking)
        name, problem = next(iter(next(each for each in damage if each).items()))
        return InputError(str(path / name), problem, "remove this checkpoint, and begin anew or from another")

    def _read(
        self, step: int, executor: Executor, optimizer: torch.optim.Optimizer | None, averages: Averages | None
    ) -> TrainerState:
        path = self._path(step)
        # The ranks have divided the digests of all files among them in `_damage`.
        iteration = load_checkpoint(
            path, executor, optimizer, averages=averages, group=self.copies.everyone, checked=True
        )
        try:
            state = msgspec.json.decode((path / STATE).read_bytes(), type=TrainerState)
        except (OSError, msgspec.MsgspecError) as error:
            raise InputError(str(path / STATE), f"cannot be read ({error})", "remove this checkpoint") from error
        if not state.iteration == iteration == step:
            told = f"says {state.iteration}, its tensors {iteration}, its folder {step}"
            raise InputError(f"{path / STATE}: iteration", told, "remove this checkpoint")
        for name, generator in _generators(executor.device).items():
            saved = path / f"{name}-{dist.get_rank()}"
            # In another layout other layers draw the numbers; then there is nothing to go on with.
            if state.layout == executor.layout.digest and saved.exists():
                generator.set_state(torch.frombuffer(bytearray(saved.read_bytes()), dtype=torch.uint8))
        return state

    def make(self) -> None:
        """Make the folder, so that one that cannot be written is known before anything is trained."""
        self._attempt(_make_writable, self.folder)

    def clear(self) -> None:
        """Remove all checkpoints of this copy."""
        for step in self.steps():
            self._attempt(_remove, self._path(step))

    def _path(self, iteration: int) -> Path:
        return self.folder / f"step-{iteration:08d}"

    def _attempt(self, write: Callable[..., T], *arguments: object) -> T:
        try:
            return write(*arguments)
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


def _make_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _make_empty(path: Path) -> None:
    _remove(path)
    path.mkdir(parents=True)


def _remove(path: Path) -> None:
    # What a link leads to is somebody else's.
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
