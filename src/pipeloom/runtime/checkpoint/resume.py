"""Checkpoints of a training run: written every so often, and the newest whole one found again."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
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
from pipeloom.files import open_regular, remove, sync_folder, write_pieces
from pipeloom.outputs import writing
from pipeloom.runtime.checkpoint.checkpoint import load_checkpoint, saved_iteration, state_tensors, write_state
from pipeloom.runtime.checkpoint.ema import Averages
from pipeloom.runtime.checkpoint.replicas import Copies, find_copies
from pipeloom.runtime.execute.executor import Executor
from pipeloom.turns import short_turns

T = TypeVar("T")

STATE = "trainer.json"
"""File of a checkpoint with its `TrainerState`."""
_REMEDY = "remove this checkpoint, and begin anew or from another"
_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"step-[0-9]{8,}")
_PARTIAL, _REPLACED = ".partial", ".replaced"
"""Endings of a checkpoint's name: while it is written or removed, and while a new one of the same iteration takes its
place."""

_Signature = tuple[tuple[str, int, int, int], ...]
"""Of the files of a checkpoint: name, size, time of the last change, number."""


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
    """Where the model came from before it was trained, see `pipeloom.runtime.model.pretrained.Pretrained`."""
    format: str = "pipeloom.trainer/1"


class Saving:
    """A checkpoint that is being written beside training; it holds copies of all that it writes.

    Parameters
    ----------
    iteration : int
        With which to go on from it.
    write : callable
        Writes it, and returns its folder.
    asynchronous : bool
        Write in a thread of its own; False: at once.
    """

    def __init__(self, iteration: int, write: Callable[[], Path], *, asynchronous: bool) -> None:
        self.iteration, self._written = iteration, Future[Path]()
        if asynchronous:
            threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True).start()
        else:
            self._written.set_result(write())

    @property
    def ended(self) -> bool:
        """Whether the checkpoint is written or has failed."""
        return self._written.done()

    def wait(self) -> Path:
        """Return the folder of the checkpoint once it is complete.

        Raises
        ------
        PipeloomError
            It could not be written.
        """
        return self._written.result()

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            with short_turns():
                path = write()
            self._written.set_result(path)
        except BaseException as error:  # raised where the checkpoint is waited for
            self._written.set_exception(error)


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often training is saved.

    All ranks read and write one folder, or where hosts do not share it, each host a copy that is kept whole: a host
    that is lost takes none away.

    A checkpoint is written under another name and gets its own once everything is there. An old one loses its name
    before it is removed. So whatever happens meanwhile, a folder ``step-N`` is whole, unless it is damaged later.

    Parameters
    ----------
    folder : Path
        Holds one folder ``step-N`` for each kept checkpoint; N is the iteration to go on with.
    every : int
        Iterations from one to the next; the end of a run is always saved.
    keep : int
        How many of the newest are kept. Only those count that are whole and not damaged, up to the one that was just
        written; whatever has a higher number stays.
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
        """Iterations with which the checkpoints of this copy go on, damaged ones included, oldest first."""
        return self._named("")

    def all_steps(self) -> list[int]:
        """The same of all copies; all ranks call it together."""
        copies = self.copies
        self._attempt(copies.all_do, self._restore if copies.is_first else None)
        return self._steps_of(copies)

    def newest(self) -> Path | None:
        """Return the folder of the newest checkpoint of this copy that is not damaged; None where there is none.

        Raises
        ------
        InputError
            When all are damaged: what is wrong with the newest.
        """
        problems: list[InputError] = []
        for step in reversed(self.steps()):
            problem = _problem_of(self._path(step))
            if problem is None:
                return self._path(step)
            _LOG.warning("%s: %s; looking for an older checkpoint", problem.entity, problem.problem)
            problems.append(problem)
        if problems:
            raise problems[0]
        return None

    def _named(self, ending: str) -> list[int]:
        """Iterations of the entries that are called as a checkpoint with an ending, in order."""
        if not self.folder.is_dir():
            return []
        names = {path.name for path in self._attempt(lambda: list(self.folder.iterdir()))}
        stems = (name.removesuffix(ending) for name in names if name.endswith(ending))
        steps = {int(stem[5:]) for stem in stems if _NAME.fullmatch(stem)}
        # A name with more zeros is not that of a checkpoint.
        return sorted(step for step in steps if self._path(step, ending).name in names)

    def _steps_of(self, copies: Copies) -> list[int]:
        return sorted(set().union(*copies.gather(self.steps())))

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
        target, beside = self._path(iteration), self._path(iteration, _PARTIAL)
        self._attempt(copies.all_do, partial(_make_empty, beside) if copies.is_first else None)
        write_state(beside, tensors, group=copies.everyone)
        self._attempt(copies.all_do, partial(_write_files, beside, dist.get_rank(), contents))
        self._attempt(copies.complete, beside, beside)
        self._attempt(copies.all_do, partial(self._take_over, iteration) if copies.is_first else None)
        self._remember(iteration)
        self._drop_old(copies, iteration)
        self._attempt(copies.follow, record)
        return target

    def _take_over(self, step: int) -> None:
        """Give a checkpoint that is whole its name; one of the same iteration goes only when the new one is there."""
        target, beside, replaced = self._path(step), self._path(step, _PARTIAL), self._path(step, _REPLACED)
        sync_folder(beside)
        if os.path.lexists(target):
            remove(replaced)
            target.rename(replaced)
        beside.rename(target)
        sync_folder(self.folder)
        remove(replaced)

    def _restore(self) -> None:
        """Give a checkpoint its name again that a new one was about to replace when the process died."""
        for step in self._named(_REPLACED):
            target, replaced = self._path(step), self._path(step, _REPLACED)
            if os.path.lexists(target):
                remove(replaced)
            else:
                replaced.rename(target)

    def _drop_old(self, copies: Copies, written: int) -> None:
        """Drop what is older than the `keep` newest checkpoints that are whole; all ranks call it together.

        What has a higher number than the one just written does not count and stays: training did not go on from it, so
        it is damaged or not this run's.
        """
        older = [step for step in self._steps_of(copies) if step <= written]
        num_whole = 0
        while older and num_whole < self.keep:
            num_whole += self._is_whole(copies, older.pop())
        self._attempt(copies.all_do, (lambda: self._drop(older, written)) if copies.is_first else None)

    def _drop(self, steps: Sequence[int], written: int) -> None:
        for step in steps:
            path, gone = self._path(step), self._path(step, _PARTIAL)
            if os.path.lexists(path):
                remove(gone)
                path.rename(gone)
        # Those that a process left when it died as well.
        for step in self._named(_PARTIAL):
            if step <= written:
                remove(self._path(step, _PARTIAL))

    def _is_whole(self, copies: Copies, step: int) -> bool:
        """Whether every copy of a checkpoint is good; all ranks call it together.

        A copy that was written or found good before is not read again, unless its files have changed since.
        """
        path = self._path(step)
        is_known = not copies.is_first or self._good.get(step, ()) == (_signature(path) or None)
        if all(copies.gather(is_known)):
            return True
        if any(copies.gather(_damage_of(path, copies.share))) or any(copies.gather(_misnumbered(path))):
            return False
        self._remember(step)
        return True

    @cached_property
    def _good(self) -> dict[int, _Signature]:
        """Checkpoints of this copy that this process has written or found good."""
        return {}

    def _remember(self, step: int) -> None:
        if self.copies.is_first:
            self._good[step] = _signature(self._path(step))

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
        copies, path, beside = self.copies, self._path(step), self._path(step, _PARTIAL)
        is_there = copies.gather(path.is_dir())
        if not any(is_there):
            return InputError(str(path), "is not a folder", _REMEDY)
        if not all(is_there):
            lacks = copies.is_first and not path.is_dir()
            self._attempt(copies.all_do, partial(_make_empty, beside) if lacks else None)
            self._attempt(copies.complete, path, beside)
            self._attempt(copies.all_do, partial(self._take_over, step) if lacks else None)
        for is_mended in (len(copies.firsts) == 1, True):
            damage = copies.gather(_damage_of(path, copies.share))
            if not any(damage) or is_mended:
                break
            lacking = set().union(*(damage[rank] for rank in copies.sharers))
            self._attempt(copies.complete, path, path, lacking)
        for name, problem in (pair for each in damage for pair in each.items()):
            return InputError(str(path / name), problem, _REMEDY)
        misnumbered: list[InputError | None] = copies.gather(_misnumbered(path))
        wrong = next(filter(None, misnumbered), None)
        if wrong is None:
            self._remember(step)
        return wrong

    def _read(
        self, step: int, executor: Executor, optimizer: torch.optim.Optimizer | None, averages: Averages | None
    ) -> TrainerState:
        path = self._path(step)
        # The ranks have divided the digests of all files among them in `_damage`.
        load_checkpoint(path, executor, optimizer, averages=averages, group=self.copies.everyone, checked=True)
        state = read_state(path)
        for name, generator in _generators(executor.device).items():
            saved = path / f"{name}-{dist.get_rank()}"
            # In another layout other layers draw the numbers; then there is nothing to go on with.
            if state.layout == executor.layout.digest and saved.exists():
                try:
                    generator.set_state(torch.frombuffer(bytearray(saved.read_bytes()), dtype=torch.uint8))
                except (OSError, RuntimeError, ValueError) as error:
                    raise InputError(str(saved), f"cannot be read ({error})", _REMEDY) from error
        return state

    def make(self) -> None:
        """Make the folder, so that one that cannot be written is known before anything is trained."""
        self._attempt(_make_writable, self.folder)
        self._attempt(self._restore)

    def clear(self) -> None:
        """Remove all checkpoints of this copy, and what is left of those that were being written or removed."""
        for ending in ("", _PARTIAL, _REPLACED):
            for step in self._named(ending):
                self._attempt(remove, self._path(step, ending))

    def _path(self, iteration: int, ending: str = "") -> Path:
        return self.folder / f"step-{iteration:08d}{ending}"

    def _attempt(self, write: Callable[..., T], *arguments: object) -> T:
        with writing(self.folder, "set another checkpoint.path"):
            return write(*arguments)


def _generators(device: torch.device) -> dict[str, torch.Generator]:
    """Random generators whose states are saved: the processor's, and the GPU's where one computes."""
    found = {"random": torch.default_generator}
    if device.type == "cuda":
        found["random-cuda"] = torch.cuda.default_generators[device.index or 0]
    return found


def read_state(path: Path) -> TrainerState:
    """Read what a checkpoint has of its trainer.

    Raises
    ------
    InputError
        When the file is missing or damaged.
    """
    try:
        with open_regular(path / STATE) as stream:
            return msgspec.json.decode(stream.read(), type=TrainerState)
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(str(path / STATE), f"cannot be read ({error})", _REMEDY) from error


def _problem_of(path: Path) -> InputError | None:
    """What is wrong with a checkpoint; None where it is good."""
    for name, problem in _damage_of(path, lambda names: names).items():
        return InputError(str(path / name), problem, _REMEDY)
    return _misnumbered(path)


def _damage_of(path: Path, share: Callable[[Sequence[str]], Sequence[str]]) -> dict[str, str]:
    from pipeloom.runtime.checkpoint.digests import find_damage  # slow to import, and seldom needed

    return find_damage(path, [STATE], share)


def _misnumbered(path: Path) -> InputError | None:
    """What is wrong with a checkpoint whose files are as they were written: it may be of another iteration."""
    step = int(path.name.removeprefix("step-"))
    try:
        state, iteration = read_state(path), saved_iteration(path)
    except InputError as error:
        return error
    if state.iteration == iteration == step:
        return None
    told = f"says {state.iteration}, its tensors {iteration}, its folder {step}"
    return InputError(f"{path / STATE}: iteration", told, _REMEDY)


def _signature(path: Path) -> _Signature:
    """What changes with the files of a checkpoint, without reading them; empty where it cannot be had."""
    try:
        found = [(each, each.stat()) for each in sorted(path.rglob("*"))]
    except OSError:
        return ()
    return tuple((str(each.relative_to(path)), is_.st_size, is_.st_mtime_ns, is_.st_ino) for each, is_ in found)


def _write_files(folder: Path, rank: int, contents: dict[str, bytes]) -> None:
    """Write what a rank saves beside tensors, and the digests of it."""
    from pipeloom.runtime.checkpoint.digests import write_digests  # slow to import, and seldom needed

    for name, content in contents.items():
        write_pieces(folder / name, [content])
    write_digests(folder, f"beside-{rank}", contents)


def _make_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _make_empty(path: Path) -> None:
    remove(path)
    path.mkdir(parents=True)
