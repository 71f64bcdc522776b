"""A folder that all ranks write: one shared folder, or one replica of it per host that are kept alike.

Which case applies is detected: each rank creates a marker file in the folder and checks which markers it sees.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipeloom.errors import ExecutionError
from pipeloom.files import remove, write_pieces
from pipeloom.runtime.launch.coordination import broadcast_bytes, broadcast_int, long_group

_PIECE_BYTES = 16 << 20
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class FolderReplicas:
    """Which ranks see which replica of a folder."""

    sharers: tuple[int, ...]
    """Ranks that see the same replica as this rank, in order, including itself."""
    firsts: tuple[int, ...]
    """The first rank of each replica."""
    everyone: dist.ProcessGroup | None = None
    """All ranks, with a timeout long enough for file operations. None is the default group."""
    between: dist.ProcessGroup | None = None
    """The ranks in ``firsts``. None if there is one replica, and on other ranks."""

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for its replica."""
        return dist.get_rank() == self.sharers[0]

    def share(self, names: Sequence[str]) -> Sequence[str]:
        """Return this rank's part of work that the ranks of a replica divide."""
        return names[self.sharers.index(dist.get_rank()) :: len(self.sharers)]

    def complete(self, source: Path, target: Path, lacking: Collection[str] = ()) -> None:
        """Copy every file that some replica has to all replicas. All ranks call it together.

        Files are copied whole or not at all. Files that all replicas have are not sent. If one rank cannot read or
        write, all ranks raise `OSError`. Files are taken from the folder ``source``, if it exists, and missing ones
        written to ``target``: the same folder, or one that will replace it. Damaged files of this replica (``lacking``)
        are replaced from another one.
        """
        self.all_do(lambda: self._complete(source, target, lacking))

    def _complete(self, source: Path, target: Path, lacking: Collection[str]) -> None:
        if len(self.firsts) == 1 or not self.is_first:
            return
        here, failure = _attempted(lambda: {name for name in _files(source) if name not in lacking})
        names_by_replica = _agreed(here or set(), failure, self.between)
        for name in sorted(set().union(*names_by_replica)):
            has = [name in each for each in names_by_replica]
            if not all(has):
                self._send(name, source, target, has.index(True), wants=not has[dist.get_rank(self.between)])

    def follow(self, files: Sequence[Path]) -> None:
        """Copy some files of rank 0 to the hosts of the other replicas. All ranks call it together."""
        self.all_do(lambda: self._follow(files))

    def _follow(self, files: Sequence[Path]) -> None:
        if len(self.firsts) == 1 or not self.is_first:
            return
        is_source = dist.get_rank() == 0
        for file in files:
            if broadcast_int(int(is_source and file.is_file()), self.between):
                self._send(file.name, file.parent, file.parent, 0, wants=not is_source)

    def all_do(self, action: Callable[[], object] | None) -> None:
        """Run an action on this rank, or none, and return when all ranks have finished. All ranks call it together.

        If it fails on some rank, all ranks raise its `OSError`, so that none waits for the failed one.
        """
        _, failure = _attempted(action or (lambda: None))
        _agreed(None, failure, self.everyone)

    def gather(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks, in order, on all of them."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.everyone)
        return values

    def _send(self, name: str, source: Path, target: Path, holder: int, wants: bool) -> None:
        """Send a file of one replica to those that lack it, one piece at a time.

        A rank that cannot read or write anymore stays until the last piece, because the others wait for it.
        """
        part = target / f"{name}.part"
        failures: list[OSError] = []
        pieces = self._shared_pieces(_pieces(source / name), holder, failures)
        if wants:
            _, failure = _attempted(lambda: write_pieces(part, pieces))
            failures += [] if failure is None else [failure]
        for _ in pieces:
            pass
        try:
            _agreed(None, next(iter(failures), None), self.between)
        except OSError:
            if wants:
                part.unlink(missing_ok=True)
            raise
        # The other ranks would wait in the next file, so they must learn of a rank that failed.
        _, failure = _attempted(lambda: _replace(part, target / name) if wants else None)
        _agreed(None, failure, self.between)

    def _shared_pieces(self, source: Iterator[bytes], holder: int, failures: list[OSError]) -> Iterator[bytes]:
        """Yield pieces of a file that one rank reads, on all ranks of ``between``. A read error ends them."""
        holds, piece = dist.get_rank(self.between) == holder, b""
        while True:
            if holds:
                try:
                    piece = next(source, b"")
                except OSError as error:
                    failures.append(error)
                    piece = b""
            piece = broadcast_bytes(piece if holds else None, self.between, at_once=0, source=holder)
            if not piece:
                return
            yield piece


def _attempted(action: Callable[[], T]) -> tuple[T | None, OSError | None]:
    """Return the result of an action, or its `OSError`."""
    try:
        return action(), None
    except OSError as error:
        return None, error


def _agreed(own_value: T, failure: OSError | None, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks of a group, in order, on all of them. If one failed, all raise its error."""
    own = None if failure is None else (failure.errno or 0, failure.strerror or str(failure), failure.filename)
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, (own_value, own), group=group)
    for _, problem in values:
        if problem is not None:
            raise OSError(*problem) from failure
    return [value for value, _ in values]


def find_replicas(folder: Path) -> FolderReplicas:
    """Create a folder, and find out which ranks of the default group share it. All ranks call it together.

    Raises `OSError` if a rank cannot write to the folder.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = long_group()
    token = broadcast_bytes(secrets.token_hex(8).encode() if rank == 0 else None).decode()
    marks = [folder / f".rank-{each}-{token}" for each in range(size)]
    _, failure = _attempted(lambda: _leave_mark(marks[rank]))
    _agreed(None, failure, everyone)
    sharers = tuple(each for each, mark in enumerate(marks) if mark.exists())
    if rank not in sharers:
        raise ExecutionError(f"{folder}: a file that rank {rank} created there is missing; use another folder")
    first = [torch.zeros((), dtype=torch.int64) for _ in range(size)]
    dist.all_gather(first, torch.tensor(sharers[0]))
    marks[rank].unlink()
    firsts = tuple(sorted({int(each) for each in first}))
    between = long_group(firsts) if len(firsts) > 1 else None
    return FolderReplicas(sharers, firsts, everyone, between if rank in firsts else None)


def _files(folder: Path) -> Iterator[str]:
    if folder.is_dir():
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix != ".part":
                yield str(path.relative_to(folder))


def _leave_mark(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _replace(part: Path, target: Path) -> None:
    if target.is_dir():
        remove(target)
    part.replace(target)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            yield piece
