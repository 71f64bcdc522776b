"""Run on ranks: copies of a folder on two hosts that fail on one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from pipeloom.runtime import copies as module
from pipeloom.runtime.coordination import long_group
from pipeloom.runtime.copies import Copies


def copy_in_spite(folder: Path, how: str) -> str:
    """Bring files of rank 0's copy into rank 1's, where something fails; what this rank is told."""
    rank = dist.get_rank()
    mine = folder / str(rank)
    mine.mkdir()
    if rank == 0:
        for name in ("a", "b", "c"):
            (mine / name).write_bytes(name.encode() * 100)
    copies = Copies((rank,), (0, 1), long_group(), long_group((0, 1)))
    if how == "write" and rank == 1:
        # Where the second file is to be written there is a folder.
        (mine / "b.part").mkdir()
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


def broken(path: Path) -> Iterator[bytes]:
    """A file or folder that can be read at first only."""
    yield path.name.encode()
    raise OSError(5, "Input/output error", str(path))
