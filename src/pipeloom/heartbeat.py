"""Status lines on standard error from a process that has printed nothing for a while."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipeloom import printing

FIRST_S, EVERY_S = 2.5, 7.0
"""Seconds without output before the first status line, and between later ones.

Their sum is below 10 s, because another process may take over just before a line is due.
"""
VARIABLE = "PIPELOOM_PROGRESS"
"""Environment variable. ``0`` turns the status lines off."""
_LOOK_S = 0.25
_ELLIPSIS = "..."


class _State:
    """The current activity, its start, and whether status lines are active or paused."""

    what: str = ""
    since_s: float = 0.0
    beats: bool = False
    paused: int = 0


_STATE = _State()


def doing(what: str, since_s: float | None = None) -> None:
    """Set the current activity, which began at a time of `time.monotonic`, by default now. Printed if it takes long."""
    _STATE.what, _STATE.since_s = what, time.monotonic() if since_s is None else since_s


def announced(line: str) -> None:
    """Set the current activity from a printed line that ends with an ellipsis. Other lines are ignored."""
    if line.endswith(_ELLIPSIS):
        text = line.partition(";")[0].removesuffix(_ELLIPSIS).rstrip()
        doing(text[:1].lower() + text[1:])


@contextmanager
def heartbeat(what: str) -> Iterator[None]:
    """Print the current activity after `FIRST_S` without output, and then every `EVERY_S`.

    Inside another heartbeat, this only changes the activity.
    """
    doing(what)
    if _STATE.beats or os.environ.get(VARIABLE) == "0":
        yield
        return
    end = threading.Event()
    thread = threading.Thread(target=_beat, args=(end,), name="heartbeat", daemon=True)
    _STATE.beats = True
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        _STATE.beats = False


@contextmanager
def paused() -> Iterator[None]:
    """Print no status lines within this context, because another process prints them."""
    _STATE.paused += 1
    try:
        yield
    finally:
        _STATE.paused -= 1


def _beat(end: threading.Event) -> None:
    wait_s, last_s = FIRST_S, time.monotonic()
    while not end.wait(_LOOK_S):
        now_s = time.monotonic()
        last_s = max(last_s, printing.last_printed_s())
        if _STATE.paused:
            last_s = now_s
        elif now_s - last_s >= wait_s:
            taken_s = now_s - _STATE.since_s
            printing.print_error(_STATE.what + (f", {taken_s:.0f} s so far" if taken_s >= 1 else ""))
            wait_s, last_s = EVERY_S, now_s
