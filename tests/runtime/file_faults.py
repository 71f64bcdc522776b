"""Faults of file operations: an audit hook that lets one operation fail, or ends the process at it."""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

_OPERATIONS = frozenset({"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link"})


class Crash(BaseException):
    """The process has died. Every later file operation raises this too, so that no handler can tidy up."""


class _Faults:
    """Counts file operations of one thread, and raises at one of them."""

    def __init__(self) -> None:
        self.thread: int | None = None
        self.at, self.kind, self.count = -1, "none", 0

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _OPERATIONS or self.thread != threading.get_ident():
            return
        if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(("/proc", "/sys", "/dev")):
            return
        self.count += 1
        if self.kind == "crash" and self.count > self.at >= 0:
            raise Crash
        if self.kind == "full" and self.count == self.at + 1:
            raise OSError(errno.ENOSPC, "No space left on device")


_faults = _Faults()
_hooks: list[bool] = []


@contextmanager
def fault(at: int, kind: Literal["none", "crash", "full"]) -> Iterator[_Faults]:
    """Let file operation number ``at`` of this thread fail; its ``count`` is the number of operations so far."""
    if not _hooks:
        # A hook stays for as long as the interpreter.
        sys.addaudithook(_faults.hook)
        _hooks.append(True)
    _faults.at, _faults.kind, _faults.count, _faults.thread = at, kind, 0, threading.get_ident()
    try:
        yield _faults
    finally:
        _faults.thread = None
