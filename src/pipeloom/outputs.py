"""Files that a command writes: check that their names do not collide, and report why one cannot be written."""

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
"""What a user can do about an `OSError`, by its number; such an error is no defect of Pipeloom."""

_OUTPUTS: list[PathLike] = []


@contextmanager
def writing(path: PathLike, elsewhere: str = "name another folder") -> Iterator[None]:
    """Raise `InputError` where the operating system refuses to write a file or folder in this context.

    Parameters
    ----------
    path : path
        The file or folder that the message names.
    elsewhere : str
        How to write to another place; the message offers it beside the remedy for the error.
    """
    try:
        yield
    except OSError as error:
        raise refused(path, error, elsewhere) from error


def refused(path: PathLike, error: OSError, elsewhere: str, problem: str = "cannot be written") -> InputError:
    """Return the error that names a file, why the operating system refuses it, and a remedy.

    Of a folder, it names the file in it that the system's error names.
    """
    name, remedies = os.fspath(path), (REMEDIES.get(error.errno or 0, ""), elsewhere)
    if isinstance(error.filename, str) and error.filename.startswith(os.path.join(name, "")):
        name = error.filename
    reason = error.strerror or str(error)
    text = f"{problem}: {reason[:1].lower()}{reason[1:]}"
    return InputError(visible_line(name), text, ", or ".join(filter(None, remedies)))


def declare_outputs(paths: Sequence[PathLike]) -> None:
    """Name all files that this command will write, before it reads any; what was declared before is forgotten.

    Raises
    ------
    InputError
        Two of them are the same file.
    """
    for one, other in combinations(paths, 2):
        if _same(one, other):
            problem = f"is named for two outputs, also as {visible_line(os.fspath(other))}"
            raise InputError(visible_line(os.fspath(one)), problem, "give each output a file of its own")
    _OUTPUTS[:] = paths


def check_input(path: PathLike) -> None:
    """Raise `InputError` where a file that is about to be read is one that this command will write."""
    if any(_same(path, output) for output in _OUTPUTS):
        problem = "is read by this command, and named as its output, which would destroy it"
        raise InputError(visible_line(os.fspath(path)), problem, "give the output another name")


def _same(one: PathLike, other: PathLike) -> bool:
    """Whether two paths lead to one file: by links of any kind, or because a file made there would be the same."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return os.path.realpath(one) == os.path.realpath(other)
