"""A short thread switch interval, for a thread that works beside another one that must not wait."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Python's default is 5 ms. A training thread would wait that long for another thread each time it wakes.
_SHORT_S = 0.0005
_LOCK = threading.Lock()
_inside = 0
_before_s = _SHORT_S


@contextmanager
def short_turns() -> Iterator[None]:
    """Shorten the thread switch interval of the interpreter until the last thread leaves this context."""
    global _inside, _before_s
    with _LOCK:
        if _inside == 0:
            _before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_before_s, _SHORT_S))
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if _inside == 0:
                sys.setswitchinterval(_before_s)
