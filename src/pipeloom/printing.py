"""The one way of text to standard output and standard error: nothing that comes from a file can control a terminal."""

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
    """Note that something was printed just now."""
    global _last_s
    _last_s = time.monotonic()


def last_printed_s() -> float:
    """Return when this process printed something last, on the clock of `time.monotonic`."""
    return _last_s


def print_text(text: str, *, to_stderr: bool = False) -> None:
    """Print lines of text, at once. Whatever in it has to stay on one line goes through `visible_line` first."""
    print(visible(text), file=sys.stderr if to_stderr else sys.stdout, flush=True)
    note_printed()


def print_line(text: str, *, to_stderr: bool = False) -> None:
    """Print one line, whatever the text holds."""
    print_text(visible_line(text), to_stderr=to_stderr)


def print_error(message: str, place: str = "pipeloom") -> None:
    """Print one line on standard error, after the name of what says it; nothing where nobody reads it any more."""
    with suppress(BrokenPipeError):
        print_line(f"{place}: {printable_line(message)}", to_stderr=True)


class _VisibleRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return visible(super().getMessage())


def escape_logs() -> None:
    """Have log messages and warnings of this process, other libraries' included, go through `visible`."""
    if logging.getLogRecordFactory() is _VisibleRecord:
        return
    logging.setLogRecordFactory(_VisibleRecord)
    plain = warnings.formatwarning

    def formatted(*arguments: Any, **named: Any) -> str:
        return visible(plain(*arguments, **named))

    warnings.formatwarning = formatted
