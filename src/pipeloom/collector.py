"""Pauses of Python's garbage collector in latency-critical code."""

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
    """Pause the garbage collector while code creates many small objects without cycles.

    A plan has about ten thousand such objects, an emulated step about a hundred thousand. Reference counting frees
    them. Their number alone would trigger the collector repeatedly, and each collection scans everything that the
    process has imported. This takes longer than a plan and as long as a step. Several threads may pause the collector
    at the same time. It resumes when the last of them is done.
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
