"""The trainer's side of the planner: asks ahead, never waits beyond a deadline, and always has a plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pipeloom.errors import InputError, PipeloomError, PlannerError
from pipeloom.packing import Packing, packing_from_counts
from pipeloom.plan import Answer, Delivery, verify
from pipeloom.planner.messages import Request, Setup, answer_of, decode, encode
from pipeloom.planner.plan_batch import Problem, plan_batch
from pipeloom.planner.process import PlannerProcess
from pipeloom.planner.service import LATEST, READY, SETUP, STOP, Store, answer_key, error_key, request_key
from pipeloom.search import Evaluations, warm_up
from pipeloom.spec import Batch

_POLL_S = 0.0005


class HostedStore(Store, Protocol):
    """A store that this process hosts and another one can reach."""

    @property
    def address(self) -> str:
        """``host:port`` for the other process."""
        ...


@dataclass
class Planner:
    """Plans every coming batch in a process of its own, while the batch before is trained on.

    Nothing is started before `start`, which the trainer calls on the one rank that talks to the planner.

    Parameters
    ----------
    setup : Setup
    open_store : callable
        Returns the store through which to speak, e.g. ``pipeloom.TcpPlanStore.host``.
    deadline_s : float
        Longest wait for a late plan, counted from when it is needed; then the fallback runs.
    start_timeout_s : float
        Longest wait for the planner to compile its kernels before the first iteration.
    """

    setup: Setup
    open_store: Callable[[], HostedStore]
    deadline_s: float = 1.0
    start_timeout_s: float = 120.0
    process: PlannerProcess | None = field(init=False, default=None)
    _store: HostedStore = field(init=False, repr=False)
    _problem: Problem = field(init=False, repr=False)
    _submitted: dict[int, Request] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Refuse deadlines that never come."""
        if not 0 <= self.deadline_s < float("inf"):
            raise InputError("planner.deadline_s", f"{self.deadline_s} is not finite and at least 0")
        self._problem = self.setup.problem()

    def start(self) -> None:
        """Open the store, start the process, and wait until both sides have compiled their kernels."""
        self._store = self.open_store()
        self._store.put(SETUP, encode(self.setup))
        self.process = PlannerProcess(self._store.address)
        self.process.start()
        # The fallback needs compiled kernels too; meanwhile the planner starts.
        warm_up()
        give_up = time.monotonic() + self.start_timeout_s
        while not self.ready and self.process.is_alive() and time.monotonic() < give_up:
            time.sleep(0.01)

    @property
    def ready(self) -> bool:
        """Whether the planner runs, has compiled its kernels and takes requests."""
        return self._is_alive() and self._store.peek(READY) is not None

    def submit(self, batch: Batch, factors: dict[str, tuple[float, float]]) -> None:
        """Hand over the metadata of a coming batch; a dead planner is started again. Returns at once."""
        request = Request(batch, factors)
        self._submitted[batch.iteration] = request
        if not self._is_alive() and self.process is not None:
            self._store.take(READY)
            self.process.restart()
        self._store.put(request_key(batch.iteration), encode(request))
        self._store.put(LATEST, str(batch.iteration).encode())

    def collect(self, iteration: int) -> Delivery:
        """Return the plan of a submitted batch: the planner's, or after the deadline the fallback.

        Every plan is checked against the batch and the layout and verified again before it is returned, so a
        planner that answers nonsense costs one fallback iteration and nothing more.

        Raises
        ------
        PipeloomError
            Only when the fallback itself cannot be made: the batch cannot be run at all.
        """
        request = self._submitted.pop(iteration)
        needed_ns = time.monotonic_ns()
        # An answer that came after its deadline is of no use to anybody.
        self._store.take(answer_key(iteration - 1))
        try:
            answer = self._wait(iteration, needed_ns)
            packing = self._accept(answer, request.batch)
        except PlannerError as error:
            return self._fallback(request, str(error))
        return Delivery(answer, packing, True, (needed_ns - answer.ready_ns) / 1e9)

    def close(self) -> None:
        """Tell the planner to stop, and see that it does."""
        if self.process is not None:
            self._store.put(STOP, b"1")
            self.process.stop()

    def _is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    def _wait(self, iteration: int, needed_ns: int) -> Answer:
        while True:
            data = self._store.take(answer_key(iteration))
            if data is not None:
                return decode(Answer, data)
            reason = self._store.take(error_key(iteration))
            if reason is not None:
                raise PlannerError(f"the planner refused the batch: {reason.decode(errors='replace')}")
            if not self._is_alive():
                raise PlannerError("the planner is not running")
            if self._store.peek(READY) is None:
                raise PlannerError("the planner is still starting")
            if time.monotonic_ns() - needed_ns > self.deadline_s * 1e9:
                raise PlannerError(f"no plan within the deadline of {self.deadline_s:g} s")
            time.sleep(_POLL_S)

    def _accept(self, answer: Answer, batch: Batch) -> Packing:
        layout = self.setup.layout
        if answer.plan.iteration != batch.iteration:
            raise PlannerError(f"the plan is for iteration {answer.plan.iteration}, not {batch.iteration}")
        if answer.plan.layout != layout.digest:
            raise PlannerError(f"the plan is for layout {answer.plan.layout}, not {layout.digest}")
        try:
            packing = packing_from_counts(
                batch, self.setup.model, layout, answer.packing.samples, answer.packing.counts
            )
            verify(answer.plan, layout, packing)
        except PipeloomError as error:
            raise PlannerError(f"the plan does not fit the batch: {error}") from error
        return packing

    def _fallback(self, request: Request, reason: str) -> Delivery:
        begin = time.monotonic()
        planned = plan_batch(
            self._problem.calibrated(request.factors),
            request.batch,
            budget=Evaluations(1),
            seed=0,
            method="portfolio",
        )
        elapsed = time.monotonic() - begin
        answer = answer_of(planned, search_s=elapsed, ready_ns=time.monotonic_ns())
        return Delivery(answer, planned.packing, False, -elapsed, reason)
