"""A folder that all ranks write: one that they share, or a copy on every host, which are then kept alike.

Nobody says which it is: each rank leaves a mark in the folder and looks whose marks it sees.
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
from pipeloom.runtime.launch.coordination import broadcast_bytes, first_says, long_group

_PIECE_BYTES = 16 << 20
T = TypeVar("T")


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

        A file is there whole or not at all. What copies have alike is not sent. What cannot be read or written on one
        rank is an `OSError` on all of them.

        Parameters
        ----------
        source : Path
            The folder to take files from, where it is there.
        target : Path
            The folder to write those to that this copy lacks; ``source``, or another that becomes it.
        lacking : collection of str
            Files that this copy has, but that are to be taken from another, since they are damaged here.
        """
        self.all_do(lambda: self._complete(source, target, lacking))

    def _complete(self, source: Path, target: Path, lacking: Collection[str]) -> None:
        if len(self.firsts) == 1 or not self.is_first:
            return
        here, failure = _attempted(lambda: {name for name in _files(source) if name not in lacking})
        theirs = _agreed(here or set(), failure, self.between)
        for name in sorted(set().union(*theirs)):
            has = [name in each for each in theirs]
            if not all(has):
                self._send(name, source, target, has.index(True), wants=not has[dist.get_rank(self.between)])

    def follow(self, files: Sequence[Path]) -> None:
        """Give the hosts of the other copies some files of rank 0's; all ranks call it together."""
        self.all_do(lambda: self._follow(files))

    def _follow(self, files: Sequence[Path]) -> None:
        if len(self.firsts) == 1 or not self.is_first:
            return
        is_source = dist.get_rank() == 0
        for file in files:
            if first_says(int(is_source and file.is_file()), self.between):
                self._send(file.name, file.parent, file.parent, 0, wants=not is_source)

    def all_do(self, action: Callable[[], object] | None) -> None:
        """Do something on this rank, or nothing, and return when all ranks have done theirs; all call it together.

        Raises
        ------
        OSError
            On all ranks, where one cannot: nobody waits for a rank that has failed.
        """
        _, failure = _attempted(action or (lambda: None))
        _agreed(None, failure, self.everyone)

    def wait(self) -> None:
        """Return when all ranks are here."""
        dist.barrier(self.everyone)

    def gather(self, mine: Any) -> list[Any]:
        """Return what every rank gives, in order, on all of them; it can be pickled."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self.everyone)
        return found

    def _send(self, name: str, source: Path, target: Path, holder: int, wants: bool) -> None:
        """Send a file of one copy to those that lack it, a piece at a time.

        Who cannot go on reading or writing stays until the last piece, for the others count on it.
        """
        part = target / f"{name}.part"
        failures: list[OSError] = []
        pieces = self._coming(_pieces(source / name), holder, failures)
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
        # The other ranks take part in the next file, so they must know of a rank that cannot.
        _, failure = _attempted(lambda: _replace(part, target / name) if wants else None)
        _agreed(None, failure, self.between)

    def _coming(self, source: Iterator[bytes], holder: int, failures: list[OSError]) -> Iterator[bytes]:
        """Pieces of a file that one rank reads, on all ranks of `between`; what it cannot read ends them."""
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
    """What an action returns, or why it cannot be done."""
    try:
        return action(), None
    except OSError as error:
        return None, error


def _agreed(mine: T, failure: OSError | None, group: dist.ProcessGroup | None) -> list[T]:
    """What every rank of a group gives, in order, on all of them.

    Raises
    ------
    OSError
        On all, where one has failed: the first's.
    """
    told = None if failure is None else (failure.errno or 0, failure.strerror or str(failure), failure.filename)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (mine, told), group=group)
    for _, problem in found:
        if problem is not None:
            raise OSError(*problem) from failure
    return [each for each, _ in found]


def find_copies(folder: Path) -> Copies:
    """Find which ranks of the default group share a folder, which is made; all call it together.

    Raises
    ------
    OSError
        The folder cannot be written by one of them.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = long_group()
    token = broadcast_bytes(secrets.token_hex(8).encode() if rank == 0 else None).decode()
    marks = [folder / f".rank-{each}-{token}" for each in range(size)]
    _, failure = _attempted(lambda: _leave_mark(marks[rank]))
    _agreed(None, failure, everyone)
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
