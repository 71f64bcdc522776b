"""A lock on a folder: the output of two runs in one folder would mix."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeloom.errors import InputError
from pipeloom.outputs import writing

LOCK = ".lock"
# Some cluster file systems have no locks; there the user is responsible.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process, and create it if it is missing.

    The operating system releases the lock when the process ends for any reason. A small file remains that locks
    nothing. Raise `InputError` if another process holds the lock, or the folder cannot be created.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with writing(folder / LOCK):
        # A link may point to a user's file, which would be emptied.
        number = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise InputError(str(folder / LOCK), "is not a regular file", "remove it")
    with os.fdopen(number, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = file.read().strip() or "unknown"
            remedy = "wait until it ends, or use another name, --runs or checkpoint.path"
            raise InputError(str(folder), f"is in use by the run of process {holder}", remedy) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise InputError(str(folder), f"cannot be locked ({error.strerror})", "use another folder") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
