"""Text output on standard output and standard error. Text from files cannot control the terminal."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from contextlib import suppress
from typing import Any

from pipeloom.errors import printable_line, visible, visible_line

_last_s = 0.0


def note_printed() -> None:
    """Record that something was printed just now."""
    global _last_s
    _last_s = time.monotonic()


def last_printed_s() -> float:
    """Return when this process last printed something, on the clock of `time.monotonic`."""
    return _last_s


def print_text(text: str, *, to_stderr: bool = False) -> None:
    """Print lines of text and flush. Pass text that must stay on one line through `visible_line` first."""
    print(visible(text), file=sys.stderr if to_stderr else sys.stdout, flush=True)
    note_printed()


def print_line(text: str, *, to_stderr: bool = False) -> None:
    """Print text as one line. Line breaks are escaped."""
    print_text(visible_line(text), to_stderr=to_stderr)


def print_error(message: str, place: str = "pipeloom") -> None:
    """Print one line on standard error with a prefix. Does nothing if the reader has closed the stream."""
    with suppress(BrokenPipeError):
        print_line(f"{place}: {printable_line(message)}", to_stderr=True)


class _VisibleRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return visible(super().getMessage())


def escape_logs() -> None:
    """Pass log messages and warnings of this process, including those of other libraries, through `visible`."""
    if logging.getLogRecordFactory() is _VisibleRecord:
        return
    logging.setLogRecordFactory(_VisibleRecord)
    plain = warnings.formatwarning

    def formatted(*arguments: Any, **named: Any) -> str:
        return visible(plain(*arguments, **named))

    warnings.formatwarning = formatted
