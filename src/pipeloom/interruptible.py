"""Kernels that may run for long, called so that signals are heard meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

MANY = 5000
"""Samples or tasks from which on a kernel may run for seconds."""
_PAUSE_S = 1.0


def interruptible(num_items: int, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a compiled function so that Ctrl-C and SIGTERM end the call, where that may take long.

    Python handles signals in the main thread, and only between two of its own instructions. So in the main thread the
    function runs in a thread of its own, without the interpreter's lock, and the main thread waits for it. If a signal
    handler raises, the exception leaves this call at once. The function goes on until it ends or the process does, so
    the arrays that it writes must not be used anymore.

    Parameters
    ----------
    num_items : int
        What the function's time grows with: samples or tasks. Below `MANY` it is called at once.
    function : callable
        Of `pipeloom.compiled`, which releases the interpreter's lock.
    """
    if num_items < MANY or threading.current_thread() is not threading.main_thread():
        return function(*arguments)
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function(*arguments))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_PAUSE_S)
    if errors:
        raise errors[0]
    return results[0]
