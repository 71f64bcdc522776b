"""Read and write files: gzip by suffix, a size limit, and atomic writes."""

from __future__ import annotations

import gzip
import os
import secrets
import stat
import zlib
from pathlib import Path

from pipeloom.errors import InputError, visible_line
from pipeloom.heartbeat import doing
from pipeloom.outputs import check_input, refused, writing

MAX_FILE_BYTES = 512 * 1024 * 1024
"""Maximum size of a file after decompression. A scheduling problem of a million tasks is about 100 MB."""

PathLike = str | os.PathLike[str]

_SIGNATURES = (
    (0, b"PAR1", "a Parquet file"),
    (0, b"PK\x03\x04", "a zip archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"\x1f\x8b", "gzip data"),
    (0, b"\x28\xb5\x2f\xfd", "zstd data"),
    (0, b"\xfd7zXZ\x00", "xz data"),
    (0, b"BZh", "bzip2 data"),
    (0, b"SQLite format 3\x00", "an SQLite database"),
)
"""Offset, signature and name of binary file formats."""


def read_bytes(path: PathLike) -> bytes:
    """Read a whole file, and decompress it if its name ends in ``.gz``.

    Raise `InputError` with the path if the file is missing, a directory, unreadable, larger than `MAX_FILE_BYTES` or
    not gzip, or if the running command will write it.
    """
    name = os.fspath(path)
    check_input(path)
    doing(f"reading {name}")
    try:
        with open(name, "rb") as file:
            if name.endswith(".gz"):
                with gzip.GzipFile(fileobj=file) as unpacked:
                    data = unpacked.read(MAX_FILE_BYTES + 1)
            else:
                data = file.read(MAX_FILE_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            printable(name), "is not a whole gzip file", "write it again, or drop .gz from its name"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(printable(name), f"cannot be read: {_reason(error)}") from error
    if len(data) > MAX_FILE_BYTES:
        raise InputError(printable(name), f"is larger than {MAX_FILE_BYTES} bytes, the most that is read")
    return data


def read_text(path: PathLike) -> str:
    """Read a UTF-8 file. Raise the errors of `read_bytes`, and `InputError` if the bytes are not UTF-8."""
    data = read_bytes(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(printable(os.fspath(path)), f"is not UTF-8 text (byte {error.start})") from error


def binary_kind(data: bytes) -> str:
    """Return the format of a binary file; empty if it is not known or may be text."""
    return next((kind for at, sign, kind in _SIGNATURES if data[at : at + len(sign)] == sign), "")


def write_bytes(path: PathLike, data: bytes) -> None:
    """Write a file atomically: write a temporary file in the same folder, then rename it.

    A file whose name ends in ``.gz`` is compressed. A target that is not a regular file (a terminal, a pipe,
    ``/dev/null``) is written directly, because a rename would destroy it. Raise `InputError` with the path if the
    folder is missing, the target is a directory, or the write fails.
    """
    check_writable(path)
    name = os.fspath(path)
    if name.endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    try:
        # Use the name itself: if standard output is a pipe, the target of /dev/stdout has no name.
        if _is_special(name):
            # A pipe without a reader raises an error; waiting for a reader could block forever.
            with open(name, "wb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                os.set_blocking(file.fileno(), True)
                file.write(data)
        else:
            _replace(os.path.realpath(name), data)
    except OSError as error:
        raise refused(printable(name), error, "name another folder") from error
    except ValueError as error:
        raise InputError(printable(name), f"cannot be written: {error}") from error


def write_text(path: PathLike, text: str) -> None:
    """Write UTF-8 text as `write_bytes` does. Raise `InputError` also if it has a name that is not Unicode."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        name = printable(text[max(0, error.start - 40) : error.end + 40])
        problem = f"cannot be written: its text has a name that is not UTF-8, near {name}"
        raise InputError(printable(os.fspath(path)), problem, "rename the file or folder that has it") from error
    write_bytes(path, data)


def is_regular_target(path: PathLike) -> bool:
    """Return whether other files can be beside it: it is not a terminal, pipe or device."""
    return not _is_special(os.fspath(path))


def check_writable(path: PathLike) -> None:
    """Raise `InputError` if `write_bytes` could not write the target. Call it before long work."""
    name = os.fspath(path)
    try:
        if _is_special(name):
            return
        target = os.path.realpath(name)
        folder, base = os.path.split(target)
        is_folder, has_folder, may_write = (os.path.isdir(target), os.path.isdir(folder), os.access(folder, os.W_OK))
        too_long = has_folder and len(os.fsencode(base)) > os.pathconf(folder, "PC_NAME_MAX")
    except (OSError, ValueError) as error:
        raise InputError(printable(name), f"cannot be written: {_reason(error)}") from error
    if is_folder:
        raise InputError(printable(name), "is a directory", "give the name of a file in it")
    if not has_folder:
        raise InputError(printable(name), "cannot be written: its folder does not exist", f"make {folder} first")
    if not may_write:
        raise InputError(printable(name), f"cannot be written: no permission to write in {folder}")
    if too_long:
        raise InputError(printable(name), "cannot be written: the file name is too long")


def make_folder(path: PathLike) -> None:
    """Create a folder and its parents if they do not exist. Raise `InputError` with the path if that fails."""
    with writing(printable(os.fspath(path))):
        Path(path).mkdir(parents=True, exist_ok=True)


def printable(name: str) -> str:
    """Return a name that can be printed on one line, with any characters."""
    if not name:
        return "(empty path)"
    text = visible_line(name)
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"


def _replace(target: str, data: bytes) -> None:
    """Write beside the target, then rename. A failed step leaves no temporary file."""
    folder, base = os.path.split(target)
    # os.open, not tempfile: the file must get the permissions of the user's umask.
    temporary = os.path.join(folder, f".{base[:40]}.{secrets.token_hex(6)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _is_special(target: str) -> bool:
    try:
        mode = os.stat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).lower()
