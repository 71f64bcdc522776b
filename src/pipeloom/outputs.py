"""Output files of a command: check that their names differ, and report why a file cannot be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations

from pipeloom.errors import InputError, visible_line

PathLike = str | os.PathLike[str]

REMEDIES = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free space in your disk quota",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EIO: "check the disk",
    errno.EROFS: "mount the file system writable",
    errno.EACCES: "allow access to it",
    errno.EPERM: "allow access to it",
    errno.EEXIST: "remove what is in its place",
    errno.ENOTDIR: "remove the file that is in place of a folder",
    errno.EISDIR: "remove the folder that is in its place",
    errno.ELOOP: "remove the symbolic link",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENXIO: "start the reader of the pipe first",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
"""Remedy for the user by the number of an `OSError`. These errors are not defects of Pipeloom."""

_OUTPUTS: list[PathLike] = []


@contextmanager
def writing(path: PathLike, elsewhere: str = "name another folder") -> Iterator[None]:
    """Raise `InputError` if the operating system refuses to write a file or folder within this context.

    The message names ``path``, and as a second remedy how to write to another place (``elsewhere``).
    """
    try:
        yield
    except OSError as error:
        raise refused(path, error, elsewhere) from error


def refused(path: PathLike, error: OSError, elsewhere: str, problem: str = "cannot be written") -> InputError:
    """Return an error that names a file, the operating system's reason and a remedy.

    If the system's error names a file inside the folder ``path``, the error names that file.
    """
    name, remedies = os.fspath(path), (REMEDIES.get(error.errno or 0, ""), elsewhere)
    if isinstance(error.filename, str) and error.filename.startswith(os.path.join(name, "")):
        name = error.filename
    reason = error.strerror or str(error)
    text = f"{problem}: {reason[:1].lower()}{reason[1:]}"
    return InputError(visible_line(name), text, ", or ".join(filter(None, remedies)))


def declare_outputs(paths: Sequence[PathLike]) -> None:
    """Declare all files that this command will write, before it reads any. Replaces earlier declarations.

    Raise `InputError` if two of them are the same file.
    """
    for one, other in combinations(paths, 2):
        if _same(one, other):
            problem = f"is named for two outputs, also by {visible_line(os.fspath(other))}"
            raise InputError(visible_line(os.fspath(one)), problem, "give each output a file of its own")
    _OUTPUTS[:] = paths


def check_input(path: PathLike) -> None:
    """Raise `InputError` if a file to be read is one that this command will write."""
    if any(_same(path, output) for output in _OUTPUTS):
        problem = "is an input of this command and also its output, which would overwrite it"
        raise InputError(visible_line(os.fspath(path)), problem, "rename the output")


def _same(one: PathLike, other: PathLike) -> bool:
    """Return whether two paths lead to the same file, through links of any kind or once the file is created."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return os.path.realpath(one) == os.path.realpath(other)
