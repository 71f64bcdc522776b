"""Short turns of this interpreter's threads, while one of them works beside another that must not wait for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Python's own is 5 ms: so long a thread that trains would wait for another, each time that it wakes.
_SHORT_S = 0.0005
_LOCK = threading.Lock()
_inside = 0
_before_s = _SHORT_S


@contextmanager
def short_turns() -> Iterator[None]:
    """Let other threads of the interpreter run sooner than usual, until the last thread that asked for it has ended."""
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
