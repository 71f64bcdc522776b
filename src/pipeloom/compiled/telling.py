"""Tell before functions are compiled, which may take long, and which who runs a command should know."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from numba.core import event


class _First(event.Listener):
    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell, self.told = tell, False

    def on_start(self, _event: Any) -> None:
        if not self.told:
            self.told = True
            self.tell()

    def on_end(self, _event: Any) -> None:
        pass


def before_compiling(tell: Callable[[], None]) -> AbstractContextManager[None]:
    """A context in which ``tell`` is called once, when the first function is not in the cache and must be compiled."""
    listening: AbstractContextManager[None] = event.install_listener("numba:compile", _First(tell))
    return listening
