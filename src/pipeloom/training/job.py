"""Job: what every process and every step of a training run knows of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from pipeloom.cost import Profile
from pipeloom.errors import InputError
from pipeloom.planner import Setup
from pipeloom.runtime import Checkpoints, Model, choose_device, this_worker
from pipeloom.runtime.launch.coordination import broadcast_bytes, together
from pipeloom.runtime.launch.device import DeviceType, Place
from pipeloom.spec import Layout, RankSpec
from pipeloom.training.config import TrainConfig
from pipeloom.training.display import Display, Quiet
from pipeloom.training.lock import locked
from pipeloom.training.loop_config import SchedulerConfig
from pipeloom.training.task import Task

AUTOCAST = {None: None, "bf16": torch.bfloat16}
"""Dtype of ``runtime.autocast``."""
_RESERVED = 16
"""One part in so many of a GPU's memory is the driver's, the messages', and lost between tensors: 5 GB of 80, as the
device tables assume. Not measured."""


def _is_below(path: Path, folder: Path) -> bool:
    # Unlike Path.resolve, it accepts a link that leads to itself.
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents


@dataclass(frozen=True)
class Job:
    """A run's settings, its task, and where it leaves what.

    Parameters
    ----------
    config : TrainConfig
    task : Task
    folder : Path
        Everything that the run leaves, on rank 0's host.
    file : Path
        The config's file, to which paths in it are relative; need not be there.
    display : Display
    layout : Layout or None
        Where the model lies, whatever ``config.layout`` says beside the number of ranks.
    profile : Profile or None
        What layers cost; None: they are measured.
    """

    config: TrainConfig
    task: Task
    folder: Path
    file: Path = Path("train.toml")
    display: Display = field(default_factory=Quiet)
    layout: Layout | None = None
    profile: Profile | None = None

    @cached_property
    def device(self) -> DeviceType:
        """What every rank computes on."""
        worker = this_worker()
        num_local = self.config.num_processes if worker is None else worker.num_local
        runtime = self.config.runtime
        return choose_device(runtime.device, num_local, runtime.transport)

    @property
    def cluster(self) -> RankSpec:
        """What plans count with: of the memory that the config states, what tensors can have."""
        stated = self.config.cluster
        capacity = stated.memory_capacity_bytes
        if self.device == "cpu" or capacity is None:
            return stated
        return msgspec.structs.replace(stated, memory_capacity_bytes=capacity - capacity // _RESERVED)

    @property
    def place(self) -> Place:
        """The same, and how messages leave it."""
        return Place(self.device, self.config.runtime.transport)

    @property
    def scheduler(self) -> SchedulerConfig:
        """What becomes of the rates: as the config says; else a cosine, and nothing for an optimiser of the task's."""
        usual = "cosine" if self.task.optimizer is None else "constant"
        return self.config.scheduler or SchedulerConfig(usual)

    @property
    def setup_path(self) -> Path:
        """Where the planner's setup is written, once, so that all ranks have one layout."""
        return self.folder / "setup.json"

    @property
    def checkpoints(self) -> Checkpoints | None:
        """Where the run is saved: what its config says, or in its own folder; None: nowhere."""
        saved = self.config.checkpoint
        if saved is None:
            return None
        where = self.file.parent / saved.path if saved.path else self.folder / "checkpoints"
        return Checkpoints(where, saved.every, saved.keep, saved.asynchronous)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other runs out of the run's folder and out of that of its checkpoints."""
        with ExitStack() as locks:
            locks.enter_context(locked(self.folder))
            # The run's own folder holds them unless the user names another.
            saved = self.checkpoints
            if saved is not None and not _is_below(saved.folder, self.folder):
                locks.enter_context(locked(saved.folder))
            if saved is not None:
                saved.make()
            yield

    def build_model(self) -> Model:
        """Build the task's model in the dtype of the run, which becomes torch's default."""
        return self.task.model(self.config.dtype, self.config.seed, **self.config.model)

    def read_setup(self) -> Setup:
        """Read what was prepared for all ranks.

        Raises
        ------
        InputError
            When it is not there, or is none.
        """
        return self._setup_of(self._setup_file())

    def _setup_file(self) -> bytes:
        try:
            return self.setup_path.read_bytes()
        except OSError as error:
            raise self._no_setup(error) from error

    def _setup_of(self, data: bytes) -> Setup:
        try:
            return msgspec.json.decode(data, type=Setup)
        except msgspec.MsgspecError as error:
            raise self._no_setup(error) from error

    def _no_setup(self, error: Exception) -> InputError:
        return InputError(str(self.setup_path.absolute()), f"cannot be read ({error})", "prepare the run first")

    def shared_setup(self) -> Setup:
        """What rank 0 has prepared, on all ranks, which may be on hosts without its files; all call it together.

        Raises
        ------
        InputError
            Where a rank has another config than rank 0.
        """
        is_first = dist.get_rank() == 0
        mine = msgspec.json.encode(self.config)
        with together("handing out the setup"):
            theirs = broadcast_bytes(mine if is_first else None)
            # As it lies in the file, which rank 0 of this very run has written.
            data = broadcast_bytes(self._setup_file() if is_first else None)
        here, there = msgspec.json.decode(mine), msgspec.json.decode(theirs)
        for field_name, value in here.items():
            if value != there[field_name]:
                raise InputError(
                    f"{self.file}: {field_name}",
                    f"is another on host {socket.gethostname()} than on rank 0's",
                    "give all hosts the same file",
                )
        return self._setup_of(data)
