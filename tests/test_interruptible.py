"""Long calls: their answers and errors come back, and a signal's handler ends the wait."""

from __future__ import annotations

import signal
import threading

import pytest

from pipeloom.interruptible import MANY, interruptible


@pytest.mark.parametrize("num_items", [1, MANY])
def test_answers_and_errors_come_back(num_items: int) -> None:
    assert interruptible(num_items, divmod, 7, 3) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        interruptible(num_items, divmod, 7, 0)


def test_short_calls_stay_in_their_thread() -> None:
    here = threading.get_ident()
    assert interruptible(MANY - 1, threading.get_ident) == here
    assert interruptible(MANY, threading.get_ident) != here


def test_a_signal_ends_the_wait() -> None:
    release, ended = threading.Event(), threading.Event()

    def long() -> None:
        release.wait(60)
        ended.set()

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        # Again after a second: Python drops what a handler raises within a weak reference's callback.
        signal.setitimer(signal.ITIMER_REAL, 0.05, 1.0)
        with pytest.raises(KeyboardInterrupt):
            interruptible(MANY, long)
        assert not ended.is_set()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        release.set()
    assert ended.wait(60)
