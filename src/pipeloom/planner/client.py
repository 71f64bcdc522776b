"""The trainer's side of the planner: asks ahead, never waits beyond a deadline, and always has a plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeloom.errors import PipeloomError, PlannerError
from pipeloom.packing import Packing, packing_from_counts
from pipeloom.plan import verify
from pipeloom.planner.messages import Answer, Request, Setup, answer_of, decode, encode
from pipeloom.planner.plan_batch import Problem, plan_batch
from pipeloom.planner.service import READY, SETUP, STOP, Store, answer_key, error_key, request_key
from pipeloom.search import Evaluations
from pipeloom.spec import Batch

_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class Delivery:
    """A plan that may be run, and where it came from."""

    answer: Answer
    packing: Packing
    fresh: bool
    """Made by the planner for this batch; else the fallback."""
    lead_s: float
    """How long before its use the plan was ready; negative for time waited."""
    reason: str
    """Why the fallback was taken; empty for a fresh plan."""


@dataclass
class PlannerClient:
    """Submits metadata and collects plans through a `Store`.

    Parameters
    ----------
    store : Store
    setup : Setup
    deadline_s : float
        Longest wait for a late plan, counted from when it is needed.
    is_alive : callable
        Whether the planner process runs; a dead one is never waited for.
    """

    store: Store
    setup: Setup
    deadline_s: float
    is_alive: Callable[[], bool]
    _problem: Problem = field(init=False)
    _submitted: dict[int, Request] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Publish the setup that the planner waits for."""
        self._problem = self.setup.problem()
        self.store.put(SETUP, encode(self.setup))

    @property
    def ready(self) -> bool:
        """Whether the planner has compiled its kernels and takes requests."""
        return self.is_alive() and self.store.peek(READY) is not None

    def submit(self, batch: Batch, factors: dict[str, tuple[float, float]]) -> None:
        """Hand over the metadata of a coming batch. Returns at once."""
        request = Request(batch, factors)
        self._submitted[batch.iteration] = request
        self.store.put(request_key(batch.iteration), encode(request))

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
        try:
            answer = self._wait(iteration, needed_ns)
            packing = self._accept(answer, request.batch)
        except PlannerError as error:
            return self._fallback(request, str(error))
        return Delivery(answer, packing, True, (needed_ns - answer.ready_ns) / 1e9, "")

    def close(self) -> None:
        """Tell the planner to stop."""
        self.store.put(STOP, b"1")

    def _wait(self, iteration: int, needed_ns: int) -> Answer:
        while True:
            data = self.store.take(answer_key(iteration))
            if data is not None:
                return decode(Answer, data)
            reason = self.store.take(error_key(iteration))
            if reason is not None:
                raise PlannerError(f"the planner refused the batch: {reason.decode(errors='replace')}")
            if not self.is_alive():
                raise PlannerError("the planner is not running")
            if self.store.peek(READY) is None:
                raise PlannerError("the planner is still starting")
            if time.monotonic_ns() - needed_ns > self.deadline_s * 1e9:
                self.store.take(request_key(iteration))
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
            method="static",
        )
        answer = answer_of(planned, search_s=time.monotonic() - begin, ready_ns=time.monotonic_ns())
        return Delivery(answer, planned.packing, False, begin - time.monotonic(), reason)
