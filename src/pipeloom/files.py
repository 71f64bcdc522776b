"""Files of checkpoints and runs: reads that never block and writes that reach the disk."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Never waits for the other end of a pipe and never reads from a device.

    Raise `OSError` if it cannot be opened or is not a regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.open("rb")


def remove(path: Path) -> None:
    """Remove a file, or a folder with its contents, if it exists. Of a symbolic link, only the link is removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder to the disk, if the file system supports it."""
    number = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(number)
    finally:
        os.close(number)


def write_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file and its parent folders, and sync its contents to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Opening a pipe would wait for its reader.
    path.unlink(missing_ok=True)
    with path.open("wb") as written:
        for piece in pieces:
            written.write(piece)
        written.flush()
        os.fsync(written.fileno())
