"""Display: how a training run tells of itself while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from pipeloom.heartbeat import EVERY_S, announced, doing, heartbeat
from pipeloom.printing import last_printed_s, print_line
from pipeloom.training.record import Summary

if TYPE_CHECKING:
    from pipeloom.runtime import StepReport


class Display(Protocol):
    """What shows a run to somebody. It is pickled: rank 0 has a copy of its own."""

    def say(self, text: str, *, warning: bool = False) -> None:
        """Tell what is being done."""
        ...

    def working(self, title: str) -> AbstractContextManager[Callable[[str, float | None], None]]:
        """Give a function that is told what is being done and which part of it is done, None where nobody knows."""
        ...

    def iterations(self, total: int, first: int) -> AbstractContextManager[Callable[[StepReport], None]]:
        """On rank 0: give a function that is called with the report of every iteration, from ``first`` on."""
        ...

    def close(self, summary: Summary) -> None:
        """On rank 0: tell what the run came to."""
        ...


class Quiet:
    """Shows nothing."""

    def say(self, text: str, *, warning: bool = False) -> None:
        """Do nothing."""

    @contextmanager
    def working(self, title: str) -> Iterator[Callable[[str, float | None], None]]:  # noqa: ARG002
        """Do nothing."""
        yield lambda _text, _share: None

    @contextmanager
    def iterations(self, total: int, first: int) -> Iterator[Callable[[StepReport], None]]:  # noqa: ARG002
        """Do nothing."""
        yield lambda _report: None

    def close(self, summary: Summary) -> None:
        """Do nothing."""


class Lines:
    """Shows a run as lines on standard error: what begins, and at least every ten seconds how far it is."""

    def say(self, text: str, *, warning: bool = False) -> None:
        """Print a line."""
        print_line(f"warning: {text}" if warning else text, to_stderr=True)
        announced(text)

    @contextmanager
    def working(self, title: str) -> Iterator[Callable[[str, float | None], None]]:
        """Name what is being done, for the lines that come if it takes long."""
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

    def close(self, summary: Summary) -> None:
        """Do nothing: the caller of `fit` has the result."""


def display_heartbeat(display: Display, what: str) -> AbstractContextManager[None]:
    """Return a `heartbeat` of what is being done, or nothing if the display shows nothing."""
    return nullcontext() if isinstance(display, Quiet) else heartbeat(what)
