"""The trainer's side of the planner, without any process beside this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from pipeloom.cost import Correction
from pipeloom.errors import InputError
from pipeloom.planner import Planner, client
from pipeloom.planner.messages import Request, decode, encode
from pipeloom.planner.process import PlannerProcess
from pipeloom.planner.service import READY, answer_key, answer_request, request_key
from tests.cases import random_batch
from tests.planner.cases import MemoryStore, random_problem


class Process(PlannerProcess):
    """Says that it runs, and is ready at once whenever it is started; nobody answers."""

    made: list[Process]
    store: MemoryStore
    killed = 0
    runs = False

    def start(self) -> None:
        self.runs = True

    def is_alive(self) -> bool:
        return self.runs

    def kill(self) -> None:
        self.killed += 1
        self.runs = False

    def stop(self, grace_s: float = 2.0) -> None:
        self.runs = False


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    made: list[Process] = []

    def make(address: str, secret: str) -> Process:
        made.append(Process(address, secret))
        return made[-1]

    monkeypatch.setattr(client, "PlannerProcess", make)
    return made


def until(condition: object, seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def test_a_planner_that_hangs_is_started_again_and_in_the_end_disabled(processes: list[Process]) -> None:
    problem, store = random_problem(3), MemoryStore()
    store.put(READY, b"1")
    planner = Planner(problem, lambda: store, deadline_s=0.01, max_missed=2)
    planner.start()
    (process,) = processes
    reasons: list[str] = []
    for iteration in range(14):
        batch = msgspec.structs.replace(random_batch(iteration), iteration=iteration)
        planner.submit(batch, Correction())
        if iteration == 4:
            # One in between that is answered: deadlines are counted in a row.
            until(lambda: store.peek(request_key(4)) is not None)
            request = decode(Request, store.values[request_key(4)])
            store.put(answer_key(4), encode(answer_request(problem, request)))
            planner.deadline_s = 30.0
        restarted = process.num_restarts
        delivery = planner.collect(iteration)
        planner.deadline_s = 0.01
        reasons.append(delivery.reason)
        if delivery.reason == "the planner is still starting":
            until(lambda: store.peek(READY) is None)
            store.put(READY, b"1")
            until(lambda: planner.ready)
        assert process.num_restarts == restarted
    late, starting = "no plan within the deadline of 0.01 s", "the planner is still starting"
    disabled = "the planner has missed 2 deadlines in a row after 3 restarts and is disabled"
    hung = [late, late, starting]
    assert reasons == [*hung, late, "", *hung, *hung, late, late, disabled]
    assert process.killed == 4
    assert not process.runs
    planner.close()


@pytest.mark.parametrize("answer", [b"", b"nonsense"])
def test_answers_that_are_rejected_are_not_missed_deadlines(processes: list[Process], answer: bytes) -> None:
    store = MemoryStore()
    store.put(READY, b"1")
    planner = Planner(random_problem(3), lambda: store, deadline_s=0.0, max_missed=2)
    planner.start()
    (process,) = processes
    for iteration in range(6):
        planner.submit(msgspec.structs.replace(random_batch(iteration), iteration=iteration), Correction())
        answered = iteration % 2 == 1
        if answered:
            planner.deadline_s = 30.0
            store.put(answer_key(iteration), answer)
        reason = planner.collect(iteration).reason
        assert reason.startswith(("the planner rejected", "Answer message") if answered else "no plan within")
        planner.deadline_s = 0.0
    assert process.num_restarts == 0
    planner.close()


def test_a_planner_that_hangs_before_it_is_ready_is_started_again(processes: list[Process]) -> None:
    planner = Planner(random_problem(3), MemoryStore, deadline_s=0.0, start_timeout_s=0.0, max_missed=2)
    planner.start()
    (process,) = processes
    restarts = []
    for iteration in range(9):
        planner.submit(msgspec.structs.replace(random_batch(iteration), iteration=iteration), Correction())
        restarts.append(process.num_restarts)
        # While it may still compile its kernels, it misses nothing.
        planner.start_timeout_s = 60.0 if iteration in (0, 1) else 0.0
        reason = planner.collect(iteration).reason
    assert restarts == [0, 0, 0, 0, 1, 1, 2, 2, 3]
    assert reason == "the planner is still starting"
    planner.close()


class SlowStore(MemoryStore):
    """Is nearly always in a call."""

    def take(self, key: str) -> bytes | None:
        time.sleep(0.02)
        return super().take(key)


def test_without_a_deadline_a_planner_is_not_lost_while_its_store_is_called(processes: list[Process]) -> None:
    stores = [SlowStore()]
    stores[0].put(READY, b"1")
    planner = Planner(random_problem(3), lambda: stores[0], deadline_s=0.0, max_missed=100)
    planner.start()
    (process,) = processes
    for iteration in range(8):
        planner.submit(msgspec.structs.replace(random_batch(iteration), iteration=iteration), Correction())
        until(lambda: planner._mailbox.is_stuck(0.0))
        assert planner.collect(iteration).reason == "no plan within the deadline of 0 s"
    assert process.num_restarts == 0
    planner.close()


def test_a_mailbox_that_is_replaced_ends(processes: list[Process]) -> None:
    class Broken(MemoryStore):
        def peek(self, key: str) -> bytes | None:
            threading.Event().wait(0.2)
            return None

    stores = [Broken(), MemoryStore()]
    opened = iter(stores)
    before = set(threading.enumerate())
    planner = Planner(random_problem(3), lambda: next(opened), deadline_s=0.0, start_timeout_s=0.0)
    planner.start()
    (thread,) = set(threading.enumerate()) - before
    planner._mailbox.is_stuck = lambda _seconds: True  # type: ignore[method-assign,union-attr]
    planner.submit(random_batch(0), Correction())
    until(lambda: not thread.is_alive())
    planner.close()


def test_a_planner_that_cannot_be_started_again_is_disabled_and_asked_no_more(processes: list[Process]) -> None:
    def refuses() -> None:
        raise OSError("no memory for another process")

    store = MemoryStore()
    planner = Planner(random_problem(3), lambda: store, deadline_s=0.01, start_timeout_s=0.0)
    planner.start()
    (process,) = processes
    process.runs, process.start = False, refuses  # type: ignore[method-assign]
    reasons = []
    for iteration in range(6):
        planner.submit(msgspec.structs.replace(random_batch(iteration), iteration=iteration), Correction())
        reasons.append(planner.collect(iteration).reason)
    assert (
        reasons == ["the planner is not running"] * 3 + ["the planner ended again after 3 restarts and is disabled"] * 3
    )
    assert not any(store.peek(request_key(iteration)) for iteration in (3, 4, 5))
    planner.close()


def test_requests_that_the_planner_skips_are_removed(processes: list[Process]) -> None:
    store = MemoryStore()
    store.put(READY, b"1")
    planner = Planner(random_problem(3), lambda: store, deadline_s=0.0)
    planner.start()
    for iteration in range(3):
        planner.submit(msgspec.structs.replace(random_batch(iteration), iteration=iteration), Correction())
    until(lambda: store.peek(request_key(2)) is not None)
    until(lambda: store.peek(request_key(0)) is None and store.peek(request_key(1)) is None)
    planner.close()


def test_a_planner_that_is_not_to_be_waited_for_at_all_is_refused() -> None:
    with pytest.raises(InputError, match=r"planner.max_missed: 0 is below 1"):
        Planner(random_problem(1), MemoryStore, max_missed=0)


class Sleeper(PlannerProcess):
    """A real process that hears nobody."""

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        os.kill(self._process.pid, signal.SIGSTOP)


def test_a_stopped_process_is_ended_in_bounded_time() -> None:
    process = Sleeper("nowhere:0", "")
    process.start()
    first = process.pid
    process.restart()
    assert process.pid != first
    assert process.is_alive()
    process.stop(grace_s=0.05)
    assert not process.is_alive()
