"""Let one process compile a kernel while the others wait, and then load the result.

The lock is an operating system lock on a file beside the cached code, so it ends with its process. If files cannot be
locked or written, every process compiles.
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
"""Timeout of waiting for another process, which may have been stopped. A kernel compiles in a few seconds."""
_PAUSE_S = 0.02


class Turn:
    """Lock of one kernel's compilation: a file that is created and not deleted, and how long to wait, in s."""

    def __init__(self, file: Path, longest_s: float = LONGEST_S) -> None:
        self.file, self.longest_s = file, longest_s
        self._descriptor: int | None = None

    @property
    def taken(self) -> bool:
        """Whether this process holds the lock."""
        return self._descriptor is not None

    def take(self, longest_s: float | None = None) -> bool:
        """Acquire the lock, and return whether to compile: False if another process still compiles at the timeout.

        ``longest_s`` is how long to wait at most. None: as long as the lock says, after which this process compiles
        too.
        """
        if self.taken or fcntl is None:
            return True
        try:
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return True
        end = time.monotonic() + (self.longest_s if longest_s is None else longest_s)
        mine = True
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(_PAUSE_S)
                    continue
                mine = longest_s is None
            except OSError:
                pass
            else:
                self._descriptor = descriptor
                return True
            os.close(descriptor)
            return mine

    def end(self) -> None:
        """Release the lock, if this process holds it."""
        if self._descriptor is not None:
            # Unlock explicitly, because a forked process may have the file open too.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None
