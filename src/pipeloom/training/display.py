"""Display: how a training run tells of itself while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

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
