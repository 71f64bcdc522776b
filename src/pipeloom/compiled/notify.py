"""Call a function before numba compiles anything, so that a command can print that compiling takes long."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from numba.core import event


class _FirstCompilation(event.Listener):
    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell, self.called = tell, False

    def on_start(self, _event: Any) -> None:
        if not self.called:
            self.called = True
            self.tell()

    def on_end(self, _event: Any) -> None:
        pass


def before_compiling(tell: Callable[[], None]) -> AbstractContextManager[None]:
    """Return a context in which ``tell`` is called once, when a function is not in the cache and must be compiled."""
    listening: AbstractContextManager[None] = event.install_listener("numba:compile", _FirstCompilation(tell))
    return listening
