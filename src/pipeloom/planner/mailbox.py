"""Mailbox: carries requests to the store and answers back in a thread of its own.

Whatever a store does or does not do, nobody who asks for a plan is held up by it beyond the time that he gives.
Answers are fetched, decoded and verified while the iteration before is being trained.
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
Given = TypeVar("Given")

# How often the thread looks for an answer: seldom while training runs, often when somebody waits for it.
_SELDOM_S, _OFTEN_S = 0.005, 0.0005
_MOST_LATE = 8


class Mailbox(Generic[Checked]):
    """Speaks with one store.

    Parameters
    ----------
    store : Store
    check : callable
        From iteration and bytes of an answer to what `wait` returns; raises `PlannerError` for what cannot be used.

    Attributes
    ----------
    ready : bool
        The planner has said that it takes requests.
    failure : str
        Why the store can no longer be used; empty while it can.
    """

    def __init__(self, store: Store, check: Callable[[int, bytes], Checked]) -> None:
        self.ready, self.failure = False, ""
        self._store, self._check = store, check
        self._changed = threading.Condition()
        self._outbox: list[tuple[str, bytes]] = []
        self._wanted: int | None = None
        self._found: dict[int, Checked | PlannerError] = {}
        self._late: list[int] = []
        self._closing = False
        self._pause_s = _SELDOM_S
        self._busy_since: float | None = None
        threading.Thread(target=self._work, name="plan mailbox", daemon=True).start()

    def put(self, key: str, value: bytes) -> None:
        """Have a key set; returns at once."""
        with self._changed:
            self._outbox.append((key, value))
            self._changed.notify_all()

    def ask(self, iteration: int, request: bytes) -> None:
        """Have a plan asked for; returns at once. What was asked before is given up."""
        with self._changed:
            if self._wanted is not None:
                self._late = [*self._late, self._wanted][-_MOST_LATE:]
            self._wanted = iteration
            self._outbox += [(request_key(iteration), request), (LATEST, str(iteration).encode())]
            self._changed.notify_all()

    def wait(self, iteration: int, seconds: float) -> Checked | None:
        """Return what came for an iteration; None where nothing has within some seconds.

        Raises
        ------
        PlannerError
            When the planner refused, its answer cannot be used, or the store is gone.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            self._pause_s = _OFTEN_S
            self._changed.notify_all()
            while iteration not in self._found and not self.failure and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._pause_s = _SELDOM_S
            found = self._found.pop(iteration, None)
            if found is None and not self.failure:
                return None
        if isinstance(found, PlannerError):
            raise found
        if found is None:
            raise PlannerError(self.failure)
        return found

    def is_stuck(self, seconds: float) -> bool:
        """Whether the store has been silent for longer than that in one call."""
        busy_since = self._busy_since
        return busy_since is not None and time.monotonic() - busy_since > seconds

    def forget_planner(self) -> None:
        """Another planner is being started: it is not ready, whatever the one before had said."""
        with self._changed:
            self.ready = False
            self._outbox.append((READY, b""))
            self._changed.notify_all()

    def close(self, seconds: float = 1.0) -> None:
        """Tell the planner to stop, and give the thread some time to say so."""
        with self._changed:
            self._closing = True
            self._outbox.append((STOP, b"1"))
            self._changed.notify_all()
            give_up = time.monotonic() + seconds
            while self._outbox and not self.failure and (left := give_up - time.monotonic()) > 0:
                self._changed.wait(left)

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        try:
            while self._turn():
                pass
        except PipeloomError as error:
            with self._changed:
                self.failure = str(error)
                self._changed.notify_all()

    def _turn(self) -> bool:
        """Send what is to be sent, then look for what is wanted; returns whether to go on."""
        with self._changed:
            while not self._outbox and not self._closing and self._wanted is None and self.ready:
                self._changed.wait()
            outbox, late = list(self._outbox), list(self._late)
        for key, value in outbox:
            self._put(key, value)
        if outbox:
            for iteration in late:
                # An answer that came after its deadline is of no use to anybody.
                self._take(answer_key(iteration))
        with self._changed:
            del self._outbox[: len(outbox)]
            self._changed.notify_all()
            wanted = self._wanted
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
            # Meanwhile yet another planner may have been asked for.
            self.ready = all(key != READY for key, _ in self._outbox)
            self._changed.notify_all()
        return True

    def _look_for_answer(self, wanted: int) -> bool:
        data = self._take(answer_key(wanted))
        if data is None:
            return False
        found: Checked | PlannerError
        try:
            if not data:
                reason = self._take(error_key(wanted)) or b"it does not say why"
                raise PlannerError(f"the planner refused the batch: {reason.decode(errors='replace')}")
            with short_turns():
                found = self._check(wanted, data)
        except PlannerError as error:
            found = error
        except Exception as error:
            # Whatever an answer does to those who check it: it costs its own iteration, never this thread.
            found = PlannerError(f"the answer cannot be checked, {type(error).__name__}: {error}")
        with self._changed:
            # One at a time: an older answer has not been asked for, and never will be.
            self._found = {wanted: found}
            if self._wanted == wanted:
                self._wanted = None
            self._changed.notify_all()
        return True

    def _call(self, call: Callable[[], Given]) -> Given:
        """Ask the store; what it raises means that it is of no more use."""
        self._busy_since = time.monotonic()
        try:
            return call()
        except PipeloomError:
            raise
        except Exception as error:
            raise PlannerError(f"the plan store failed, {type(error).__name__}: {error}") from error
        finally:
            self._busy_since = None
