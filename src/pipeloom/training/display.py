"""Displays: how a training run reports its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from pipeloom.heartbeat import EVERY_S, announced, doing, heartbeat
from pipeloom.printing import last_printed_s, print_line
from pipeloom.training.record import Summary

if TYPE_CHECKING:
    from pipeloom.runtime import StepReport


class Display:
    """Shows the progress of a run; this base class shows nothing. It is pickled: rank 0 has its own copy."""

    def say(self, text: str, *, warning: bool = False) -> None:
        """Show a message about the current step."""

    @contextmanager
    def working(self, title: str) -> Iterator[Callable[[str, float | None], None]]:  # noqa: ARG002
        """Yield a function that shows the current step and the completed share, which is None if unknown."""
        yield lambda _text, _share: None

    @contextmanager
    def iterations(self, total: int, first: int) -> Iterator[Callable[[StepReport], None]]:  # noqa: ARG002
        """On rank 0, yield a function to call with the report of every iteration, from ``first`` on."""
        yield lambda _report: None

    def close(self, summary: Summary) -> None:
        """On rank 0, show the summary of the run."""


class Quiet(Display):
    """Shows nothing."""


class Lines(Display):
    """Shows a run as lines on standard error: each step, and the progress at least every ten seconds."""

    def say(self, text: str, *, warning: bool = False) -> None:
        """Print a line."""
        print_line(f"warning: {text}" if warning else text, to_stderr=True)
        announced(text)

    @contextmanager
    def working(self, title: str) -> Iterator[Callable[[str, float | None], None]]:
        """Set the current step for the lines that appear if it takes long."""
        yield lambda text, _share: doing(f"{title}: {text}")

    @contextmanager
    def iterations(self, total: int, first: int) -> Iterator[Callable[[StepReport], None]]:
        """Print the first iteration, the last one, and one whenever nothing was printed for a while."""

        def show(report: StepReport) -> None:
            done = report.iteration + 1
            doing(f"training, iteration {done}")
            if done in (first + 1, total) or time.monotonic() - last_printed_s() > EVERY_S:
                took = f"{report.step_s:.2f} s, bubbles {report.measured_bubble_share:.0%}"
                print_line(f"iteration {done}: loss {report.loss:.4f}, {took}", to_stderr=True)

        with heartbeat("training"):
            yield show


def display_heartbeat(display: Display, what: str) -> AbstractContextManager[None]:
    """Return a `heartbeat` for this work, or a null context if the display shows nothing."""
    return nullcontext() if isinstance(display, Quiet) else heartbeat(what)
