"""One process at a time compiles a kernel; the others wait, and load what it has written.

The lock is one of the operating system on a file beside the cached code, so it ends with the process that holds it,
however that ends. Where files cannot be locked or written, everybody compiles.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]

LONGEST_S = 300.0
"""Who has waited so long for another process compiles too: it may have been stopped. A kernel takes a few seconds."""
_PAUSE_S = 0.02


class Turn:
    """A kernel's turn to be compiled.

    Parameters
    ----------
    file : Path
        The file that is locked; it is created, and stays.
    longest_s : float
        Seconds to wait, at most.
    """

    def __init__(self, file: Path, longest_s: float = LONGEST_S) -> None:
        self.file, self.longest_s = file, longest_s
        self._descriptor: int | None = None

    @property
    def taken(self) -> bool:
        """Whether this process has the turn."""
        return self._descriptor is not None

    def take(self) -> None:
        """Wait until no other process has the turn, or for long enough."""
        if self.taken or fcntl is None:
            return
        try:
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return
        end = time.monotonic() + self.longest_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(_PAUSE_S)
                    continue
            except OSError:
                pass
            else:
                self._descriptor = descriptor
                return
            os.close(descriptor)
            return

    def end(self) -> None:
        """Let the next one have it; nothing where this process does not have it."""
        if self._descriptor is not None:
            # Said, since a process that was forked meanwhile has the file open too.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None
