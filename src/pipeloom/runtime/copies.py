"""A folder that all ranks write: one that they share, or a copy on every host, which are then kept alike.

Nobody says which it is: each rank leaves a mark in the folder and looks whose marks it sees.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeloom.errors import ExecutionError
from pipeloom.runtime.coordination import broadcast_bytes, first_says, long_group

_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class Copies:
    """Which ranks see which copy of a folder.

    Attributes
    ----------
    sharers : tuple of int
        Ranks that see this rank's copy, in order; itself among them.
    firsts : tuple of int
        The first rank of each copy.
    everyone : ProcessGroup or None
        All ranks; they wait for one another for as long as files take. None: the default group.
    between : ProcessGroup or None
        Of ``firsts``; None where there is one copy, or on ranks that are not the first of theirs.
    """

    sharers: tuple[int, ...]
    firsts: tuple[int, ...]
    everyone: dist.ProcessGroup | None = None
    between: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that acts for its copy."""
        return dist.get_rank() == self.sharers[0]

    def share(self, names: Sequence[str]) -> Sequence[str]:
        """Return this rank's part of what the ranks of a copy divide among them."""
        return names[self.sharers.index(dist.get_rank()) :: len(self.sharers)]

    def complete(self, source: Path, target: Path, lacking: Collection[str] = ()) -> None:
        """Bring every file that some copy has into all; all ranks call it together.

        A file is there whole or not at all. What copies have alike is not sent.

        Parameters
        ----------
        source : Path
            The folder to take files from, where it is there.
        target : Path
            The folder to write those to that this copy lacks; ``source``, or another that becomes it.
        lacking : collection of str
            Files that this copy has, but that are to be taken from another, since they are damaged here.
        """
        if len(self.firsts) > 1 and self.is_first:
            here = {name for name in _files(source) if name not in lacking}
            theirs: list[set[str]] = [set() for _ in self.firsts]
            dist.all_gather_object(theirs, here, group=self.between)
            for name in sorted(set().union(*theirs)):
                has = [name in each for each in theirs]
                if not all(has):
                    self._send(name, source, target, has.index(True), wants=name not in here)
        self.wait()

    def follow(self, files: Sequence[Path]) -> None:
        """Give the hosts of the other copies some files of rank 0's; all ranks call it together."""
        if len(self.firsts) > 1 and self.is_first:
            is_source = dist.get_rank() == 0
            for file in files:
                if first_says(int(is_source and file.is_file()), self.between):
                    self._send(file.name, file.parent, file.parent, 0, wants=not is_source)
        self.wait()

    def wait(self) -> None:
        """Return when all ranks are here."""
        dist.barrier(self.everyone)

    def gather(self, mine: Any) -> list[Any]:
        """Return what every rank gives, in order, on all of them; it can be pickled."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self.everyone)
        return found

    def _send(self, name: str, source: Path, target: Path, holder: int, wants: bool) -> None:
        """Send a file of one copy to those that lack it, a piece at a time."""
        holds = dist.get_rank(self.between) == holder
        pieces = _pieces(source / name) if holds else None
        part = target / f"{name}.part"
        if wants:
            part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") if wants else open(os.devnull, "wb") as written:
            while True:
                given = next(pieces, b"") if pieces is not None else None
                piece = broadcast_bytes(given, self.between, at_once=0, source=holder)
                written.write(piece)
                if not piece:
                    break
            written.flush()
            if wants:
                os.fsync(written.fileno())
        if wants:
            part.replace(target / name)


def find_copies(folder: Path) -> Copies:
    """Find which ranks of the default group share a folder, which is made; all call it together.

    Raises
    ------
    OSError
        The folder cannot be written.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = long_group()
    token = broadcast_bytes(secrets.token_hex(8).encode() if rank == 0 else None).decode()
    marks = [folder / f".rank-{each}-{token}" for each in range(size)]
    folder.mkdir(parents=True, exist_ok=True)
    marks[rank].touch()
    dist.barrier(everyone)
    sharers = tuple(each for each, mark in enumerate(marks) if mark.exists())
    if rank not in sharers:
        raise ExecutionError(f"{folder}: a file that rank {rank} has made there is not there; give another folder")
    first = [torch.zeros((), dtype=torch.int64) for _ in range(size)]
    dist.all_gather(first, torch.tensor(sharers[0]))
    marks[rank].unlink()
    firsts = tuple(sorted({int(each) for each in first}))
    between = long_group(firsts) if len(firsts) > 1 else None
    return Copies(sharers, firsts, everyone, between if rank in firsts else None)


def _files(folder: Path) -> Iterator[str]:
    if folder.is_dir():
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix != ".part":
                yield str(path.relative_to(folder))


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            yield piece
