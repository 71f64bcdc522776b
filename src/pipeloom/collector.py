"""Python's garbage collector, kept out of work that is waited for."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_paused = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Make many small objects without the collector looking over the whole process in the middle of it.

    A plan is some ten thousand objects without cycles, an emulated step some hundred thousand, which go when they are
    no longer referred to. Their number alone would start the collector, again and again, and each time it looks at all
    that the process has imported: that takes longer than a plan does, and as long as a step. Threads may pause it at
    the same time; it goes on when the last of them is done.
    """
    global _paused, _was_enabled
    with _LOCK:
        if _paused == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _paused += 1
    try:
        yield
    finally:
        with _LOCK:
            _paused -= 1
            if _paused == 0 and _was_enabled:
                gc.enable()
