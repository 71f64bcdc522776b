"""Lines on standard error that say what a process does, if it has printed nothing for a while."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipeloom import printing

FIRST_S, EVERY_S = 2.5, 7.0
"""Seconds without a line: until the first one of a heartbeat, and from then on.

Their sum is below 10 s: another process may take over just before a line is due.
"""
VARIABLE = "PIPELOOM_PROGRESS"
"""Environment variable; ``0`` turns these lines off."""
_LOOK_S = 0.25
_ELLIPSIS = "..."


class _State:
    """What this process does, since when, and whether anything beats or is silenced."""

    what: str = ""
    since_s: float = 0.0
    beats: bool = False
    paused: int = 0


_STATE = _State()


def doing(what: str) -> None:
    """Name what the process does from here on. It is printed only if it takes long."""
    _STATE.what, _STATE.since_s = what, time.monotonic()


def announced(line: str) -> None:
    """Take over what a printed line names, if it names work: such a line ends with an ellipsis."""
    if line.endswith(_ELLIPSIS):
        text = line.partition(";")[0].removesuffix(_ELLIPSIS).rstrip()
        doing(text[:1].lower() + text[1:])


@contextmanager
def heartbeat(what: str) -> Iterator[None]:
    """Print what is being done after `FIRST_S` without a line, and then after every `EVERY_S`.

    Inside another heartbeat, only ``what`` changes.
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
    """Print nothing in this context: another process says what is being done."""
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
