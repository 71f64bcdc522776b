"""Checkpoints of a training run: written at intervals, and the newest complete one found again."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
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
from pipeloom.runtime.checkpoint.replicas import FolderReplicas, find_replicas
from pipeloom.runtime.execute.executor import Executor
from pipeloom.runtime.launch import accelerator
from pipeloom.turns import short_turns

T = TypeVar("T")

STATE = "trainer.json"
"""File of a checkpoint with its `TrainerState`."""
_REMEDY = "remove this checkpoint, and restart or resume from another one"
_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"step-[0-9]{8,}")
_PARTIAL, _REPLACED = ".partial", ".replaced"
"""Suffixes of a checkpoint's name: while it is written or removed, and while a new one of the same iteration replaces
it."""

_Signature = tuple[tuple[str, int, int, int], ...]
"""Name, size, modification time and inode number of each file of a checkpoint."""


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of a trainer apart from weights, optimizer state and random numbers."""

    iteration: Number
    """The next iteration to run."""
    batch: str
    """Digest of the previous batch, to check that the data is the same when training resumes."""
    layout: str
    num_measured: Number = 0
    """Number of iterations from which the calibration has learned."""
    correction: Correction = Correction()
    evaluations: tuple[tuple[Number, Finite], ...] = ()
    """Iteration and loss of the first evaluation after every iteration that has one."""
    origin: str = ""
    """Origin of the model before training, see `pipeloom.runtime.model.pretrained.Pretrained`."""
    run: str = ""
    """Id of the run, which a resumed run keeps. Empty in checkpoints of older versions."""
    format: str = "pipeloom.trainer/1"


class PendingCheckpoint:
    """A checkpoint that is written during training. It holds copies of everything that it writes.

    ``write`` writes the checkpoint of an iteration, at which training will resume, and returns its folder. It runs in a
    thread if ``asynchronous``, else at once. The thread selects ``device``, which is this rank's: PyTorch's writer uses
    the current one.
    """

    def __init__(self, iteration: int, write: Callable[[], Path], *, asynchronous: bool, device: torch.device) -> None:
        self.iteration, self._written = iteration, Future[Path]()
        if asynchronous:
            threading.Thread(target=self._run, args=(write, device), name="checkpoint", daemon=True).start()
        else:
            self._written.set_result(write())

    @property
    def ended(self) -> bool:
        """Whether the checkpoint is written or has failed."""
        return self._written.done()

    def wait(self) -> Path:
        """Return the folder of the checkpoint once it is complete. Raises the error of writing it."""
        return self._written.result()

    def wait_at_most(self, seconds: float) -> None:
        """Return once the checkpoint is complete or has failed, or after some seconds."""
        wait((self._written,), seconds)

    def _run(self, write: Callable[[], Path], device: torch.device) -> None:
        try:
            accelerator.select(device)
            with short_turns():
                path = write()
            self._written.set_result(path)
        except BaseException as error:  # raised where the checkpoint is waited for
            self._written.set_exception(error)


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often training is saved.

    All ranks read and write one folder. If hosts do not share it, each host keeps a complete replica, so that losing a
    host loses no checkpoint.

    A checkpoint is written under another name and renamed once it is complete. An old one is renamed before it is
    removed. A folder ``step-N`` is therefore always complete, unless it is damaged later.

    Parameters
    ----------
    folder : Path
        Contains one folder ``step-N`` for each kept checkpoint, where N is the iteration to resume at.
    every : int
        Number of iterations between checkpoints. The end of a run is always saved.
    keep : int
        Number of checkpoints to keep. Only complete, undamaged ones up to the one just written count. Those with
        higher numbers stay.
    asynchronous : bool
        Write from copies in host memory while training continues. With False, training waits.
    """

    folder: Path
    every: int = 100
    keep: int = 2
    asynchronous: bool = True
    _sharers: dict[Path, FolderReplicas] = field(init=False, default_factory=dict, repr=False, compare=False)
    """Which ranks see which replica of the folder of the history, once it is saved."""

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise InputError(f"checkpoint.{name}", f"{getattr(self, name)} is below 1")

    @cached_property
    def replicas(self) -> FolderReplicas:
        """Which ranks see which replica of the folder. All ranks access it together the first time."""
        return self._attempt(find_replicas, self.folder)

    def steps(self) -> list[int]:
        """Return the iterations of this replica's checkpoints, including damaged ones, oldest first."""
        return self._named("")

    def all_steps(self) -> list[int]:
        """Return the iterations of the checkpoints of all replicas. All ranks call it together."""
        replicas = self.replicas
        self._attempt(replicas.all_do, self._restore if replicas.is_first else None)
        return self._steps_of(replicas)

    def set_aside(self, run: str) -> None:
        """Rename the checkpoints of other runs, so that no rank resumes from them. All ranks call it together.

        Parameters
        ----------
        run : str
            Id of the run whose checkpoints stay, see `TrainerState`. Damaged ones stay as well.
        """
        replicas = self.replicas
        self._attempt(replicas.all_do, partial(self._set_aside, run) if replicas.is_first else None)

    def _set_aside(self, run: str) -> None:
        self._restore()
        for step, found in self._runs().items():
            if found != run:
                path = self._path(step)
                aside = path.with_name(f"{path.name}.run-{found or 'unknown'}")
                remove(aside)
                path.rename(aside)
                _LOG.warning("%s: belongs to another run; renamed to %s", path, aside.name)

    def _runs(self) -> dict[int, str]:
        """Return the run of each checkpoint of this replica whose state can be read, oldest first."""
        runs = {}
        for step in self.steps():
            with suppress(InputError):
                runs[step] = read_state(self._path(step)).run
        return runs

    def _check_one_run(self) -> None:
        """Raise `InputError` if there are checkpoints of different runs. All ranks call it together."""
        own = self._runs() if self.replicas.is_first else {}
        newest = {run: f"after {step} iterations on host {socket.gethostname()}" for step, run in own.items()}
        found = [each for of_rank in self.replicas.gather(newest) for each in of_rank.items()]
        if len({run for run, _ in found}) > 1:
            raise InputError(
                str(self.folder),
                f"has checkpoints of different runs: {', '.join(where for _, where in found)}",
                "remove those of the other run, on the hosts that have them",
            )

    def newest(self) -> Path | None:
        """Return the folder of this replica's newest undamaged checkpoint, or None if there are no checkpoints.

        Raises
        ------
        InputError
            All checkpoints are damaged. The error describes the newest.
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
        """Return the iterations of entries named like a checkpoint with a suffix, in order."""
        if not self.folder.is_dir():
            return []
        names = {path.name for path in self._attempt(lambda: list(self.folder.iterdir()))}
        stems = (name.removesuffix(ending) for name in names if name.endswith(ending))
        steps = {int(stem[5:]) for stem in stems if _NAME.fullmatch(stem)}
        # A name with more zeros is not a checkpoint's.
        return sorted(step for step in steps if self._path(step, ending).name in names)

    def _steps_of(self, replicas: FolderReplicas) -> list[int]:
        return sorted(set().union(*replicas.gather(self.steps())))

    def save(
        self,
        executor: Executor,
        optimizer: torch.optim.Optimizer | None,
        state: TrainerState,
        averages: Averages | None = None,
        record: Sequence[Path] = (),
    ) -> PendingCheckpoint:
        """Begin to write a checkpoint. Old ones are dropped once it is complete. All ranks call it together.

        Only one is written at a time: wait for one before the next call.

        Parameters
        ----------
        executor, optimizer, state, averages
            The state to save.
        record : sequence of Path
            Files of the run's history written by rank 0. Hosts that do not share them receive them with the
            checkpoint.

        Raises
        ------
        InputError
            The folder cannot be written.
        """
        replicas, asynchronous = self.replicas, self.asynchronous
        # Other ranks may share the folder of the history than that of the checkpoints.
        for history in sorted({path.parent for path in record} - self._sharers.keys()):
            self._sharers[history] = self._attempt(find_replicas, history)
        # Training changes the tensors, so an asynchronous save needs copies.
        tensors = {
            name: tensor.detach().to("cpu", copy=True) if asynchronous else tensor
            for name, tensor in state_tensors(executor, optimizer, state.iteration, averages=averages).items()
        }
        contents = {
            f"{name}-{dist.get_rank()}": generator.get_state().numpy().tobytes()
            for name, generator in _generators(executor).items()
        }
        if dist.get_rank() == 0:
            contents[STATE] = msgspec.json.encode(state)
            if executor.model.pretrained is not None:
                contents |= {name: text.encode() for name, text in executor.model.pretrained.kept().items()}
        return PendingCheckpoint(
            state.iteration,
            lambda: self._save(replicas, state.iteration, tensors, contents, record),
            asynchronous=asynchronous,
            device=executor.device,
        )

    def _save(
        self,
        replicas: FolderReplicas,
        iteration: int,
        tensors: Mapping[str, torch.Tensor],
        contents: dict[str, bytes],
        record: Sequence[Path],
    ) -> Path:
        target, beside = self._path(iteration), self._path(iteration, _PARTIAL)
        self._attempt(replicas.all_do, partial(_make_empty, beside) if replicas.is_first else None)
        write_state(beside, tensors, group=replicas.everyone)
        self._attempt(replicas.all_do, partial(_write_files, beside, dist.get_rank(), contents))
        self._attempt(replicas.complete, beside, beside)
        self._attempt(replicas.all_do, partial(self._take_over, iteration) if replicas.is_first else None)
        self._remember(iteration)
        self._drop_old(replicas, iteration)
        for history, sharers in self._sharers.items():
            self._attempt(sharers.follow, [path for path in record if path.parent == history])
        return target

    def _take_over(self, step: int) -> None:
        """Rename a complete checkpoint to its final name. One of the same iteration is removed only afterwards."""
        target, beside, replaced = self._path(step), self._path(step, _PARTIAL), self._path(step, _REPLACED)
        sync_folder(beside)
        if os.path.lexists(target):
            remove(replaced)
            target.rename(replaced)
        beside.rename(target)
        sync_folder(self.folder)
        remove(replaced)

    def _restore(self) -> None:
        """Restore the name of a checkpoint that was being replaced when the process was killed."""
        for step in self._named(_REPLACED):
            target, replaced = self._path(step), self._path(step, _REPLACED)
            if os.path.lexists(target):
                remove(replaced)
            else:
                replaced.rename(target)

    def _drop_old(self, replicas: FolderReplicas, written: int) -> None:
        """Remove checkpoints older than the ``keep`` newest complete ones. All ranks call it together.

        Checkpoints with a higher number than the one just written do not count and stay. Training did not resume from
        them, so they are damaged or from another run.
        """
        older = [step for step in self._steps_of(replicas) if step <= written]
        num_whole = 0
        while older and num_whole < self.keep:
            num_whole += self._is_whole(replicas, older.pop())
        self._attempt(replicas.all_do, (lambda: self._drop(older, written)) if replicas.is_first else None)

    def _drop(self, steps: Sequence[int], written: int) -> None:
        for step in steps:
            path, gone = self._path(step), self._path(step, _PARTIAL)
            if os.path.lexists(path):
                remove(gone)
                path.rename(gone)
        # Also those that a killed process left.
        for step in self._named(_PARTIAL):
            if step <= written:
                remove(self._path(step, _PARTIAL))

    def _is_whole(self, replicas: FolderReplicas, step: int) -> bool:
        """Return whether every replica of a checkpoint is good. All ranks call it together.

        A replica that was written or checked before is read again only if its files have changed.
        """
        path = self._path(step)
        is_known = not replicas.is_first or self._good.get(step, ()) == (_signature(path) or None)
        if all(replicas.gather(is_known)):
            return True
        if any(replicas.gather(_damage_of(path, replicas.share))) or any(replicas.gather(_misnumbered(path))):
            return False
        self._remember(step)
        return True

    @cached_property
    def _good(self) -> dict[int, _Signature]:
        """Checkpoints of this replica that this process has written or checked, with their signatures."""
        return {}

    def _remember(self, step: int) -> None:
        if self.replicas.is_first:
            self._good[step] = _signature(self._path(step))

    def load(
        self, executor: Executor, optimizer: torch.optim.Optimizer | None, averages: Averages | None = None
    ) -> TrainerState | None:
        """Load the newest undamaged checkpoint. Returns None if there are none. All ranks call it together.

        Raises
        ------
        InputError
            It is of another model, there are checkpoints of different runs, or all are damaged. In that case the error
            describes the newest.
        """
        steps = self.all_steps()
        self._check_one_run()
        damaged: InputError | None = None
        for step in reversed(steps):
            problem = self._damage(step)
            if problem is None:
                return self._read(step, executor, optimizer, averages)
            if dist.get_rank() == 0 and step != steps[0]:
                _LOG.warning("%s: %s; resuming from an older checkpoint", problem.entity, problem.problem)
            damaged = damaged or problem
        if damaged is not None:
            raise damaged
        return None

    def _damage(self, step: int) -> InputError | None:
        """Return the damage of a checkpoint that no replica can repair. Damaged replicas are repaired from others."""
        replicas, path, beside = self.replicas, self._path(step), self._path(step, _PARTIAL)
        is_there = replicas.gather(path.is_dir())
        if not any(is_there):
            return InputError(str(path), "is not a folder", _REMEDY)
        if not all(is_there):
            is_missing = replicas.is_first and not path.is_dir()
            self._attempt(replicas.all_do, partial(_make_empty, beside) if is_missing else None)
            self._attempt(replicas.complete, path, beside)
            self._attempt(replicas.all_do, partial(self._take_over, step) if is_missing else None)
        for is_repaired in (len(replicas.firsts) == 1, True):
            damage = replicas.gather(_damage_of(path, replicas.share))
            if not any(damage) or is_repaired:
                break
            lacking = set().union(*(damage[rank] for rank in replicas.sharers))
            self._attempt(replicas.complete, path, path, lacking)
        for name, problem in (pair for each in damage for pair in each.items()):
            return InputError(str(path / name), problem, _REMEDY)
        misnumbered: list[InputError | None] = replicas.gather(_misnumbered(path))
        wrong = next(filter(None, misnumbered), None)
        if wrong is None:
            self._remember(step)
        return wrong

    def _read(
        self, step: int, executor: Executor, optimizer: torch.optim.Optimizer | None, averages: Averages | None
    ) -> TrainerState:
        path = self._path(step)
        # `_damage` has compared the digests of all files, divided among the ranks.
        load_checkpoint(path, executor, optimizer, averages=averages, group=self.replicas.everyone, checked=True)
        state = read_state(path)
        for name, generator in _generators(executor).items():
            saved = path / f"{name}-{dist.get_rank()}"
            # With another layout, other layers draw the numbers, so no state carries over.
            if state.layout == executor.layout.digest and saved.exists():
                try:
                    generator.set_state(torch.frombuffer(bytearray(saved.read_bytes()), dtype=torch.uint8))
                except (OSError, RuntimeError, ValueError) as error:
                    raise InputError(str(saved), f"cannot be read ({error})", _REMEDY) from error
        return state

    def make(self) -> None:
        """Create the folder, so that a folder that cannot be written is reported before training."""
        self._attempt(_make_writable, self.folder)
        self._attempt(self._restore)

    def clear(self) -> None:
        """Remove all checkpoints of this replica, including incomplete ones."""
        for ending in ("", _PARTIAL, _REPLACED):
            for step in self._named(ending):
                self._attempt(remove, self._path(step, ending))

    def _path(self, iteration: int, ending: str = "") -> Path:
        return self.folder / f"step-{iteration:08d}{ending}"

    def _attempt(self, write: Callable[..., T], *arguments: object) -> T:
        with writing(self.folder, "set another checkpoint.path"):
            return write(*arguments)


def _generators(executor: Executor) -> dict[str, torch.Generator]:
    """Return the random generators whose states are saved: the CPU's, and the GPU's if it is used.

    With `ExecutionOptions.random_seed`, layers do not need their states. Batches may draw from them too, and are drawn
    again when a run resumes, so their states are then neither saved nor restored.
    """
    if executor.forward_seeds is not None:
        return {}
    generators = {"random": torch.default_generator}
    if own := accelerator.generator(executor.device):
        generators[f"random-{executor.device.type}"] = own
    return generators


def read_state(path: Path) -> TrainerState:
    """Read the trainer's state from a checkpoint. Raises `InputError` if the file is missing or damaged."""
    try:
        with open_regular(path / STATE) as stream:
            return msgspec.json.decode(stream.read(), type=TrainerState)
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(str(path / STATE), f"cannot be read ({error})", _REMEDY) from error


def _problem_of(path: Path) -> InputError | None:
    """Return the damage of a checkpoint, or None if it is good."""
    for name, problem in _damage_of(path, lambda names: names).items():
        return InputError(str(path / name), problem, _REMEDY)
    return _misnumbered(path)


def _damage_of(path: Path, share: Callable[[Sequence[str]], Sequence[str]]) -> dict[str, str]:
    from pipeloom.runtime.checkpoint.digests import find_damage  # slow to import, and seldom needed

    return find_damage(path, [STATE], share)


def _misnumbered(path: Path) -> InputError | None:
    """Return an error if the files of an undamaged checkpoint are of another iteration than its folder."""
    step = int(path.name.removeprefix("step-"))
    try:
        state, iteration = read_state(path), saved_iteration(path)
    except InputError as error:
        return error
    if state.iteration == iteration == step:
        return None
    problem = f"says {state.iteration}, its tensors {iteration}, its folder {step}"
    return InputError(f"{path / STATE}: iteration", problem, _REMEDY)


def _signature(path: Path) -> _Signature:
    """Return the signature of a checkpoint's files without reading them. Empty if it is unavailable."""
    try:
        files = [(each, each.stat()) for each in sorted(path.rglob("*"))]
    except OSError:
        return ()
    return tuple((str(each.relative_to(path)), is_.st_size, is_.st_mtime_ns, is_.st_ino) for each, is_ in files)


def _write_files(folder: Path, rank: int, contents: dict[str, bytes]) -> None:
    """Write a rank's files beside the tensors, and their digests."""
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
