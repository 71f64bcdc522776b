"""Run on ranks: copies of a folder on two hosts that fail on one of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from pipeloom.runtime import Checkpoints, Executor, ThreadHub
from pipeloom.runtime.checkpoint import replicas as module
from pipeloom.runtime.checkpoint.replicas import FolderReplicas
from pipeloom.runtime.checkpoint.resume import TrainerState
from pipeloom.runtime.launch.coordination import long_group

from .cases import random_run


def copy_in_spite(folder: Path, how: str) -> str:
    """Bring files of rank 0's copy into rank 1's, where something fails; what this rank is told."""
    rank = dist.get_rank()
    mine = folder / str(rank)
    mine.mkdir()
    if rank == 0:
        for name in ("a", "b", "c"):
            (mine / name).write_bytes(name.encode() * 100)
    copies = FolderReplicas((rank,), (0, 1), long_group(), long_group((0, 1)))
    if how == "write" and rank == 1:
        # Where the second file is to be written there is a folder.
        (mine / "b.part").mkdir()
    if how == "folder" and rank == 1:
        (mine / "b" / "within").mkdir(parents=True)
    if how == "name" and rank == 1:
        module._replace = refuse  # type: ignore[assignment]
    if how == "read" and rank == 0:
        module._pieces = broken  # type: ignore[assignment]
    if how == "list" and rank == 1:
        module._files = broken  # type: ignore[assignment]
    try:
        if how == "alone":
            copies.all_do((mine / "absent").rmdir if rank == 1 else None)
        else:
            copies.complete(mine, mine)
    except OSError as error:
        left = sorted(path.name for path in mine.iterdir() if path.is_file()) if rank == 1 else []
        return f"{error.strerror} {' '.join(left)}".strip()
    return "none"


def refuse(part: Path, target: Path) -> None:
    """A file that cannot be given its name."""
    part.unlink()
    raise OSError(13, "Permission denied", str(target))


def keep_on_hosts(folder: Path) -> list[object]:
    """Save, damage and load where two hosts do not share their folder; what this rank has seen."""
    rank = dist.get_rank()
    run = random_run(3, 1)
    executor = Executor(run.model, run.case.layout, 0, ThreadHub().transport(0))
    copies = FolderReplicas((rank,), (0, 1), long_group(), long_group((0, 1)))

    def checkpoints(keep: int) -> Checkpoints:
        found = Checkpoints(folder / str(rank), keep=keep, asynchronous=False)
        found.__dict__["copies"] = copies
        return found

    def save(step: int, keep: int) -> list[int]:
        checkpoints(keep).save(executor, None, TrainerState(step, "", executor.layout.digest)).wait()
        return checkpoints(1).steps()

    def load() -> int:
        state = checkpoints(1).load(executor, None)
        return 0 if state is None else state.iteration

    def path(step: int) -> Path:
        return folder / str(rank) / f"step-{step:08d}"

    seen: list[object] = [save(2, 9), save(4, 9)]
    if rank == 1:
        (path(4) / "trainer.json").write_bytes(b"")
    # Host 1 has no good copy of 4, so 2 stays on both.
    seen.append(save(6, 2))
    if rank == 1:
        path(6).rename(path(6).with_name("step-00000006.replaced"))
    seen.append(load())
    if rank == 1:
        shutil.rmtree(path(6))
        os.mkfifo(path(6))
    seen.append(load())
    if rank == 1:
        (path(6) / "trainer.json").unlink()
        os.mkfifo(path(6) / "trainer.json")
        (path(6) / "__0_0.distcp").unlink(missing_ok=True)
        (path(6) / "__0_0.distcp").mkdir()
    seen.append(load())
    seen.append(save(7, 1))
    return seen


def record_on_hosts(folder: Path, shared: str) -> tuple[bool, str]:
    """Save a history where two hosts share the folder of the run, or that of the checkpoints, but not the other.

    Returns whether this rank's file of the history is the one that rank 0 wrote, and what is in it.
    """
    rank = dist.get_rank()
    run = random_run(3, 1)
    executor = Executor(run.model, run.case.layout, 0, ThreadHub().transport(0))
    names = {"run": ("all", str(rank)), "checkpoints": (str(rank), "all")}[shared]
    history, saved = (folder / kind / name for kind, name in zip(("run", "saved"), names, strict=True))
    history.mkdir(parents=True, exist_ok=True)
    path = history / "history.jsonl"
    if rank == 0:
        path.write_text("0")
    dist.barrier()
    before = path.stat().st_ino if path.exists() else 0
    checkpoints = Checkpoints(saved, asynchronous=False)
    checkpoints.save(executor, None, TrainerState(2, "", executor.layout.digest), record=[path]).wait()
    return path.stat().st_ino == before, path.read_text()


def broken(path: Path) -> Iterator[bytes]:
    """A file or folder that can be read at first only."""
    yield path.name.encode()
    raise OSError(5, "Input/output error", str(path))
