"""Mailbox: sends requests to the store and fetches answers in a separate thread.

A slow or broken store cannot block the trainer for longer than the trainer's own time limits. Answers are fetched,
decoded and verified while the previous iteration is trained.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from pipeloom.errors import PipeloomError, PlannerError
from pipeloom.planner.service import LATEST, READY, STOP, Store, answer_key, error_key, request_key
from pipeloom.turns import short_turns

Checked = TypeVar("Checked")
Result = TypeVar("Result")

# Seconds between checks for an answer: while training runs, and while the trainer waits for the answer.
_IDLE_POLL_S, _WAITING_POLL_S = 0.005, 0.0005
_MOST_LATE = 8


class AnswerError(PlannerError):
    """The planner's answer has arrived, but it rejects the batch or is not valid."""


class Mailbox(Generic[Checked]):
    """Communicates with one store.

    Parameters
    ----------
    check : callable
        Returns the result of `wait` for the iteration and bytes of an answer. Raises `PlannerError` for an invalid
        answer.

    Attributes
    ----------
    ready : bool
        Whether the planner has announced that it accepts requests.
    failure : str
        Why the store can no longer be used; empty while it works.
    """

    def __init__(self, store: Store, check: Callable[[int, bytes], Checked]) -> None:
        self.ready, self.failure = False, ""
        self._store, self._check = store, check
        self._changed = threading.Condition()
        self._outbox: list[tuple[str, bytes]] = []
        self._pending: int | None = None
        self._answers: dict[int, Checked | AnswerError] = {}
        self._late: list[int] = []
        self._closing = False
        self._pause_s = _IDLE_POLL_S
        self._busy_since: float | None = None
        threading.Thread(target=self._work, name="plan mailbox", daemon=True).start()

    def put(self, key: str, value: bytes) -> None:
        """Set a key; returns at once."""
        with self._changed:
            self._outbox.append((key, value))
            self._changed.notify_all()

    def ask(self, iteration: int, request: bytes) -> None:
        """Request a plan; returns at once. Earlier requests are abandoned."""
        with self._changed:
            if self._pending is not None:
                self._late = [*self._late, self._pending][-_MOST_LATE:]
            self._pending = iteration
            self.put(request_key(iteration), request)
            self.put(LATEST, str(iteration).encode())

    def wait(self, iteration: int, seconds: float) -> Checked | None:
        """Return the answer for an iteration, or None if none arrives within this many seconds.

        Raises
        ------
        AnswerError
            If the planner rejected the batch, or its answer is invalid.
        PlannerError
            If the store failed.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            self._pause_s = _WAITING_POLL_S
            self._changed.notify_all()
            while iteration not in self._answers and not self.failure and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._pause_s = _IDLE_POLL_S
            found = self._answers.pop(iteration, None)
            if found is None and not self.failure:
                return None
        if isinstance(found, AnswerError):
            raise found
        if found is None:
            raise PlannerError(self.failure)
        return found

    def is_stuck(self, seconds: float) -> bool:
        """Return whether a call of the store has not returned for more than this many seconds."""
        busy_since = self._busy_since
        return busy_since is not None and time.monotonic() - busy_since > seconds

    def forget_planner(self) -> None:
        """Reset `ready`, because another planner is being started."""
        with self._changed:
            self.ready = False
            self.put(READY, b"")

    def close(self, seconds: float = 1.0) -> None:
        """Send the stop message to the planner, waiting at most this many seconds for the thread to do so."""
        with self._changed:
            self._closing = True
            self.put(STOP, b"1")
            give_up = time.monotonic() + seconds
            while self._outbox and not self.failure and (left := give_up - time.monotonic()) > 0:
                self._changed.wait(left)

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        try:
            while self._step():
                pass
        except PipeloomError as error:
            with self._changed:
                self.failure = str(error)
                self._changed.notify_all()

    def _step(self) -> bool:
        """Send all outgoing messages, then check for the pending answer; return whether to continue."""
        with self._changed:
            while not self._outbox and not self._closing and self._pending is None and self.ready:
                self._changed.wait()
            outbox, late = list(self._outbox), list(self._late)
        for key, value in outbox:
            self._put(key, value)
        if outbox:
            for iteration in late:
                # Discard abandoned requests that the planner skipped, and answers to the others.
                self._take(request_key(iteration))
                self._take(answer_key(iteration))
        with self._changed:
            del self._outbox[: len(outbox)]
            self._changed.notify_all()
            wanted = self._pending
        if self._closing:
            return bool(self._outbox)
        if not self.ready:
            found = self._look_for_planner()
        else:
            found = wanted is None or self._look_for_answer(wanted)
        if not found:
            with self._changed:
                if not self._outbox:
                    self._changed.wait(self._pause_s)
        return True

    def _put(self, key: str, value: bytes) -> None:
        if key == READY:
            self._take(READY)
        else:
            self._call(lambda: self._store.put(key, value))

    def _take(self, key: str) -> bytes | None:
        return self._call(lambda: self._store.take(key))

    def _look_for_planner(self) -> bool:
        if self._call(lambda: self._store.peek(READY)) is None:
            return False
        with self._changed:
            # Another planner may have been requested meanwhile.
            self.ready = all(key != READY for key, _ in self._outbox)
            self._changed.notify_all()
        return True

    def _look_for_answer(self, wanted: int) -> bool:
        data = self._take(answer_key(wanted))
        if data is None:
            return False
        found: Checked | AnswerError
        try:
            if not data:
                reason = self._take(error_key(wanted)) or b"no reason was given"
                raise AnswerError(f"the planner rejected the batch: {reason.decode(errors='replace')}")
            with short_turns():
                found = self._check(wanted, data)
        except PlannerError as error:
            found = AnswerError(str(error))
        except Exception as error:
            # If the check of an answer raises, only this iteration fails, not the thread.
            found = AnswerError(f"the answer cannot be checked, {type(error).__name__}: {error}")
        with self._changed:
            # Keep only this answer. The trainer no longer waits for older ones.
            self._answers = {wanted: found}
            if self._pending == wanted:
                self._pending = None
            self._changed.notify_all()
        return True

    def _call(self, call: Callable[[], Result]) -> Result:
        """Call the store. After any exception it can no longer be used."""
        self._busy_since = time.monotonic()
        try:
            return call()
        except PipeloomError:
            raise
        except Exception as error:
            raise PlannerError(f"the plan store failed, {type(error).__name__}: {error}") from error
        finally:
            self._busy_since = None
