"""Saving: a checkpoint that is being written beside training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from pipeloom.turns import short_turns


class Saving:
    """A checkpoint that is being written beside training; it holds copies of all that it writes.

    Parameters
    ----------
    iteration : int
        With which to go on from it.
    write : callable
        Writes it, and returns its folder.
    asynchronous : bool
        Write in a thread of its own; False: at once.
    """

    def __init__(self, iteration: int, write: Callable[[], Path], *, asynchronous: bool) -> None:
        self.iteration = iteration
        self._write, self._path = write, Path()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True) if asynchronous else None
        if self._thread is None:
            self._path = write()
        else:
            self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether it is written, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Return its folder once it is whole.

        Raises
        ------
        PipeloomError
            It could not be written.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._path

    def _run(self) -> None:
        try:
            with short_turns():
                self._path = self._write()
        except BaseException as error:  # told to who waits
            self._error = error
