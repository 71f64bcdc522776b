"""Job: the settings, task and folder of a training run, known to all its processes."""

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
from pipeloom.planner import PlanningProblem, read_problem
from pipeloom.planner.problem_file import decode_problem, encode_problem
from pipeloom.runtime import Checkpoints, Model, choose_device, this_worker
from pipeloom.runtime.launch.coordination import broadcast_bytes, together
from pipeloom.runtime.launch.device import DeviceType, Place
from pipeloom.spec import Layout, RankSpec
from pipeloom.training.config import RunConfig
from pipeloom.training.display import Display, Quiet
from pipeloom.training.lock import locked
from pipeloom.training.loop_config import SchedulerConfig
from pipeloom.training.task import Task

AUTOCAST = {None: None, "bf16": torch.bfloat16}
"""Dtype of each value of ``runtime.autocast``."""
_RESERVED = 16
"""Inverse of the share of a GPU's memory for driver, messages and fragmentation: 5 GB of 80, as in the device tables.
Not measured."""


def _is_within(path: Path, folder: Path) -> bool:
    # Unlike Path.resolve, it accepts a link that leads to itself.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


@dataclass(frozen=True)
class Job:
    """The settings of a run, its task and its folder; `TrainingRun` describes the fields."""

    config: RunConfig
    task: Task
    folder: Path
    file: Path = Path("train.toml")
    display: Display = field(default_factory=Quiet)
    layout: Layout | None = None
    profile: Profile | None = None

    @cached_property
    def device(self) -> DeviceType:
        """Device of every rank."""
        worker = this_worker()
        num_local = self.config.num_processes if worker is None else worker.num_local
        runtime = self.config.runtime
        return choose_device(runtime.device, num_local, runtime.transport)

    @property
    def cluster(self) -> RankSpec:
        """The ranks for planning, with the part of the configured memory that tensors can use."""
        configured = self.config.cluster
        capacity = configured.memory_capacity_bytes
        if self.device == "cpu" or capacity is None:
            return configured
        return msgspec.structs.replace(configured, memory_capacity_bytes=capacity - capacity // _RESERVED)

    @property
    def place(self) -> Place:
        """The device and the transport of messages."""
        return Place(self.device, self.config.runtime.transport)

    @property
    def scheduler(self) -> SchedulerConfig:
        """The learning-rate schedule: the config's, else a cosine, or constant rates for the task's own optimizer."""
        usual = "cosine" if self.task.optimizer is None else "constant"
        return self.config.scheduler or SchedulerConfig(usual)

    @property
    def setup_path(self) -> Path:
        """File of the planning problem, written once so that all ranks have the same layout."""
        return self.folder / "setup.json"

    @property
    def checkpoints(self) -> Checkpoints | None:
        """Where the run is saved: as configured, or in its own folder. None: nowhere."""
        saved = self.config.checkpoint
        if saved is None:
            return None
        where = self.file.parent / saved.path if saved.path else self.folder / "checkpoints"
        return Checkpoints(where, saved.every, saved.keep, saved.asynchronous)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folders of the run and of its checkpoints against other runs."""
        with ExitStack() as locks:
            locks.enter_context(locked(self.folder))
            # Checkpoints are in the run's folder by default.
            saved = self.checkpoints
            if saved is not None and not _is_within(saved.folder, self.folder):
                locks.enter_context(locked(saved.folder))
            if saved is not None:
                saved.make()
            yield

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.config.name or self.folder.name

    @property
    def dtype(self) -> str:
        """Name of the dtype of the weights."""
        return self.config.dtype or "float32"

    def build_model(self) -> Model:
        """Build the task's model in the dtype of the run, which becomes torch's default."""
        return self.task.model(self.dtype, self.config.seed, **self.config.model)

    def read_problem(self) -> PlanningProblem:
        """Read the planning problem that was prepared for all ranks; raise `InputError` if that fails."""
        try:
            return read_problem(self.setup_path.absolute())
        except InputError as error:
            raise InputError(error.entity, error.problem, "prepare the run first") from error

    def shared_problem(self) -> PlanningProblem:
        """Broadcast rank 0's problem to all ranks, which may be on hosts without its file; all ranks call it together.

        Raise `InputError` if a rank's config differs from rank 0's.
        """
        is_first = dist.get_rank() == 0
        mine = msgspec.json.encode(self.config)
        with together("broadcasting the planning problem"):
            theirs = broadcast_bytes(mine if is_first else None)
            data = broadcast_bytes(encode_problem(self.read_problem()) if is_first else None)
        here, there = msgspec.json.decode(mine), msgspec.json.decode(theirs)
        for field_name, value in here.items():
            if value != there[field_name]:
                raise InputError(
                    f"{self.file}: {field_name}",
                    f"differs between host {socket.gethostname()} and rank 0's host",
                    "give all hosts the same file",
                )
        return decode_problem(data)
