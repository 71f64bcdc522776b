"""Long tests end: one that hangs fails with the place where it hangs, and what it started is ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

# Many times what the longest takes on two cores with nothing beside it.
SOAK_BOUND_S = 3600


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Bound the time of every soak test."""
    if item.get_closest_marker("soak") is None or not hasattr(signal, "setitimer"):
        return (yield)

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{item.name} has not ended within {SOAK_BOUND_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, SOAK_BOUND_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
