"""The mailbox: whatever the store does, who asks is answered in time."""

from __future__ import annotations

import threading
import time

import pytest

from pipeloom.errors import PlannerError
from pipeloom.planner.mailbox import AnswerError, Mailbox
from pipeloom.planner.service import LATEST, READY, STOP, answer_key, error_key, request_key
from tests.planner.cases import MemoryStore


def text(iteration: int, data: bytes) -> str:
    if data == b"nonsense":
        raise PlannerError("is nonsense")
    if data == b"worse":
        raise KeyError("DF")
    return f"{iteration} {data.decode()}"


def until(condition: object, seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def test_requests_go_out_and_answers_come_back() -> None:
    store = MemoryStore()
    store.put(READY, b"1")
    mailbox = Mailbox(store, text)
    mailbox.ask(4, b"four")
    assert mailbox.wait(4, 0.0) is None
    until(lambda: store.peek(LATEST) == b"4")
    assert store.peek(request_key(4)) == b"four"
    store.put(answer_key(4), b"plan")
    assert mailbox.wait(4, 20.0) == "4 plan"
    for iteration, answer, reason in (
        (5, b"nonsense", "is nonsense"),
        (6, b"", "rejected the batch: too long"),
        (7, b"worse", "the answer cannot be checked, KeyError: 'DF'"),
    ):
        mailbox.ask(iteration, b"?")
        store.put(error_key(iteration), b"too long")
        store.put(answer_key(iteration), answer)
        with pytest.raises(AnswerError, match=reason):
            mailbox.wait(iteration, 20.0)
    mailbox.ask(8, b"eight")
    store.put(answer_key(8), b"again")
    assert mailbox.wait(8, 20.0) == "8 again"
    mailbox.close()
    assert store.peek(STOP) == b"1"


def test_late_answers_are_thrown_away() -> None:
    store = MemoryStore()
    store.put(READY, b"1")
    mailbox = Mailbox(store, text)
    mailbox.ask(1, b"one")
    assert mailbox.wait(1, 0.01) is None
    mailbox.ask(2, b"two")
    until(lambda: store.peek(LATEST) == b"2")
    store.put(answer_key(1), b"late")
    mailbox.ask(3, b"three")
    until(lambda: store.peek(answer_key(1)) is None)
    store.put(answer_key(3), b"plan")
    assert mailbox.wait(3, 20.0) == "3 plan"


def test_another_planner_is_not_ready_because_the_one_before_was() -> None:
    store = MemoryStore()
    store.put(READY, b"1")
    mailbox = Mailbox(store, text)
    until(lambda: mailbox.ready)
    mailbox.forget_planner()
    assert not mailbox.ready
    until(lambda: store.peek(READY) is None)
    assert not mailbox.ready
    store.put(READY, b"1")
    until(lambda: mailbox.ready)


class Broken(MemoryStore):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.end = threading.Event()

    def take(self, key: str) -> bytes | None:
        if self.how == "silent":
            self.end.wait(30)
        raise OSError("the cable is cut")


def test_a_store_that_fails_is_reported() -> None:
    store = Broken("fails")
    store.put(READY, b"1")
    mailbox = Mailbox(store, text)
    mailbox.ask(1, b"one")
    with pytest.raises(PlannerError, match="the plan store failed, OSError: the cable is cut"):
        mailbox.wait(1, 20.0)
    assert mailbox.failure
    mailbox.close()


def test_a_silent_store_holds_nobody_up() -> None:
    store = Broken("silent")
    store.put(READY, b"1")
    mailbox = Mailbox(store, text)
    mailbox.ask(1, b"one")
    assert mailbox.wait(1, 0.05) is None
    until(lambda: mailbox.is_stuck(0.05))
    mailbox.ask(2, b"two")
    assert mailbox.wait(2, 0.0) is None
    store.end.set()
