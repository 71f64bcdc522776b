"""Long-running compiled functions that can be interrupted by signals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

MANY = 5000
"""Number of samples or tasks from which a compiled function may run for seconds."""
_PAUSE_S = 1.0


def interruptible(num_items: int, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a compiled function such that Ctrl-C and SIGTERM can end a long call.

    Python handles signals only in the main thread, between two of its own instructions. In the main thread, the
    function, which releases the interpreter's lock, therefore runs in a second thread, and the main thread waits for
    it. If a signal handler raises, the exception leaves this call at once. The function then runs on until it ends or
    the process ends, so do not use the arrays that it writes afterwards.

    Below `MANY` samples or tasks (``num_items``), the function is called directly.
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
