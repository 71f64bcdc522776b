"""The trainer's side of the planner. It requests plans ahead, waits up to a deadline and always returns a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeloom.collector import collector_paused
from pipeloom.cost import Correction
from pipeloom.errors import PipeloomError, PlannerError, check_count, check_not_negative
from pipeloom.packing import packing_from_counts
from pipeloom.plan import BACKENDS, Answer, Delivery, check_shapes, delivery_of, verify
from pipeloom.planner.mailbox import AnswerError, Mailbox
from pipeloom.planner.messages import Request, answer_of, decode, encode
from pipeloom.planner.planning import PlannedBatch, plan_batch
from pipeloom.planner.problem import PlanningProblem
from pipeloom.planner.problem_file import encode_problem
from pipeloom.planner.process import PlannerProcess
from pipeloom.planner.service import SETUP, Store
from pipeloom.search import Budget
from pipeloom.spec import Batch

# A store that has not answered for this many seconds is lost.
_STORE_S = 1.0
# A wait checks this often whether the planner is alive.
_SLICE_S = 0.02

DEADLINE_S = 1.0
"""Default time for which training waits for a late plan."""


class HostedStore(Store, Protocol):
    """A store that this process hosts and another process can reach."""

    @property
    def address(self) -> str:
        """``host:port`` for the other process."""
        ...

    @property
    def secret(self) -> str:
        """The secret that the other process needs to connect."""
        ...


@dataclass
class Planner:
    """Plans each coming batch in a separate process while the batch before it is trained.

    Nothing starts before `start`, which the trainer calls on the one rank that communicates with the planner.

    Parameters
    ----------
    problem : PlanningProblem
        What to plan, with measured costs.
    open_store : callable
        Returns the store for messages, for example ``pipeloom.TcpPlanStore.host``. Called again if a store fails.
    deadline_s : float
        Longest wait for a late plan in seconds, from the moment it is needed. Then the fallback plan runs.
    start_timeout_s : float
        Longest wait in seconds for the planner to compile its kernels before the first iteration. Each deadline after
        this time counts as missed if the planner is still starting.
    max_missed : int
        Number of consecutive deadlines that a planner may miss. It then counts as hanging and is killed and restarted.
        After the last restart it is disabled.
    """

    problem: PlanningProblem
    open_store: Callable[[], HostedStore]
    deadline_s: float = DEADLINE_S
    start_timeout_s: float = 120.0
    max_missed: int = 3
    process: PlannerProcess | None = field(init=False, default=None)
    _mailbox: Mailbox[Delivery] | None = field(init=False, default=None, repr=False)
    _encoded: bytes = field(init=False, repr=False)
    _submitted: dict[int, Request] = field(init=False, default_factory=dict, repr=False)
    _ahead: tuple[Batch | None, tuple[Correction, ...]] = field(init=False, default=(None, ()), repr=False)
    _num_missed: int = field(init=False, default=0, repr=False)
    _no_mailbox_reason: str = field(init=False, default="the plan store is lost", repr=False)
    """Why there is no mailbox, if there is none."""

    def __post_init__(self) -> None:
        """Raise `InputError` for costs without a profile, a negative deadline or a count below 1."""
        check_not_negative("planner.deadline_s", self.deadline_s)
        check_count("planner.max_missed", self.max_missed)
        self._encoded = encode_problem(self.problem)

    def start(self) -> None:
        """Open the store, start the process, and wait until both sides have compiled their kernels."""
        store = self.open_store()
        self._mailbox = self._connect(store)
        self.process = PlannerProcess(store.address, store.secret)
        self.process.start()
        # The fallback plan needs compiled kernels too. Compile them while the planner starts.
        self.problem.compile_kernels()
        give_up = time.monotonic() + self.start_timeout_s
        while not self.ready and self.process.is_alive() and time.monotonic() < give_up:
            time.sleep(0.01)

    @property
    def ready(self) -> bool:
        """Whether the planner runs, has compiled its kernels and accepts requests."""
        return self._is_alive() and self._mailbox is not None and self._mailbox.ready

    @property
    def is_disabled(self) -> bool:
        """Whether the planner takes no requests any more, because it cannot be restarted."""
        return self._mailbox is None

    def look_ahead(self, batch: Batch, corrections: Sequence[Correction] = ()) -> None:
        """Request that the global batch after the next submitted one is assigned to replicas.

        `collect` of the next submitted batch returns the assignment. ``corrections`` are the measured corrections of
        each replica; empty if all are alike.
        """
        self._ahead = batch, tuple(corrections)

    def submit(self, batch: Batch, correction: Correction) -> None:
        """Send the metadata of a coming batch; restart a dead or hanging planner. Returns at once."""
        request = Request(batch, correction, *self._ahead)
        self._ahead = None, ()
        self._submitted[batch.iteration] = request
        self._restart_if_needed()
        if self._mailbox is not None:
            self._mailbox.ask(batch.iteration, encode(request))

    def collect(self, iteration: int) -> Delivery:
        """Return the plan of a submitted batch: the planner's, or the fallback plan after the deadline.

        Every plan is checked against the batch and the layout and verified again. If the planner returns an invalid
        plan, that iteration runs on the fallback plan.

        Raises
        ------
        PipeloomError
            If not even the fallback plan can be made, so the batch cannot run.
        """
        needed_ns = time.monotonic_ns()
        try:
            delivery = self._wait(iteration, needed_ns)
        except PlannerError as error:
            if isinstance(error, AnswerError):
                # A planner that answers in time does not hang.
                self._num_missed = 0
            return self._fallback(self._submitted.pop(iteration), str(error))
        self._submitted.pop(iteration)
        self._num_missed = 0
        return delivery.needed_at(needed_ns)

    def close(self) -> None:
        """Stop the planner."""
        if self._mailbox is not None:
            self._mailbox.close()
        if self.process is not None:
            self.process.stop()

    def _connect(self, store: Store) -> Mailbox[Delivery]:
        mailbox = Mailbox(store, self._accept)
        mailbox.put(SETUP, self._encoded)
        return mailbox

    def _restart_if_needed(self) -> None:
        """Restart a planner that has died or hangs, with a new store if the old one failed."""
        if self.process is None or self._mailbox is None:
            return
        lost = bool(self._mailbox.failure) or self._mailbox.is_stuck(self._silent_s)
        hangs = self._num_missed >= self.max_missed
        if self.process.is_alive() and not lost and not hangs:
            return
        self._num_missed = 0
        if not self.process.may_restart():
            if not lost:
                how = f"has missed {self.max_missed} deadlines in a row" if hangs else "ended again"
                self._no_mailbox_reason = (
                    f"the planner {how} after {self.process.num_restarts} restarts and is disabled"
                )
            # Requests that nobody takes would fill the memory of the store.
            self._mailbox.close(0.0)
            self.process.kill()
            self._mailbox = None
            return
        if lost:
            # Otherwise its thread would go on polling the old store.
            self._mailbox.close(0.0)
            try:
                store = self.open_store()
            except PipeloomError:
                self._mailbox = None
                return
            self._mailbox = self._connect(store)
            self.process.address, self.process.secret = store.address, store.secret
        else:
            self._mailbox.forget_planner()
        self.process.restart()

    @property
    def _silent_s(self) -> float:
        """Longest time in seconds in which a working store answers, whatever the deadline."""
        return max(self.deadline_s, _STORE_S)

    def _is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    def _wait(self, iteration: int, needed_ns: int) -> Delivery:
        while True:
            mailbox = self._mailbox
            if mailbox is None:
                raise PlannerError(self._no_mailbox_reason)
            # First check without waiting. An answer that has arrived is valid even if the planner has died since.
            alive, ready = self._is_alive(), mailbox.ready
            left = self.deadline_s - (time.monotonic_ns() - needed_ns) / 1e9
            delivery = mailbox.wait(iteration, min(_SLICE_S, max(0.0, left)) if alive and ready else 0.0)
            if delivery is not None:
                return delivery
            if mailbox.is_stuck(self._silent_s):
                raise PlannerError(f"the plan store has not answered for {self._silent_s:g} s")
            if not alive:
                raise PlannerError("the planner is not running")
            if not ready:
                # A planner may also hang before it is ready.
                assert self.process is not None
                self._num_missed += time.monotonic() - self.process.started_s > self.start_timeout_s
                raise PlannerError("the planner is still starting")
            if left <= 0:
                self._num_missed += 1
                raise PlannerError(f"no plan within the deadline of {self.deadline_s:g} s")

    @collector_paused()
    def _accept(self, iteration: int, data: bytes) -> Delivery:
        """Check an answer against its batch and the layout, and verify it again; runs in the mailbox's thread."""
        request = self._submitted.get(iteration)
        if request is None:
            raise PlannerError(f"no request for iteration {iteration} is pending")
        answer, layout = decode(Answer, data), self.problem.layout
        if answer.plan.iteration != iteration:
            raise PlannerError(f"the plan is for iteration {answer.plan.iteration}, not {iteration}")
        if answer.plan.layout != layout.digest:
            raise PlannerError(f"the plan is for layout {answer.plan.layout}, not {layout.digest}")
        try:
            packing = packing_from_counts(
                request.batch, self.problem.model, layout, answer.packing.samples, answer.packing.counts
            )
            verify(answer.plan, layout, packing, single_communicator=BACKENDS[self.problem.backend].single_communicator)
            check_shapes(answer.plan, self.problem.model, layout, packing)
        except PipeloomError as error:
            raise PlannerError(f"the plan does not fit the batch: {error}") from error
        return delivery_of(answer, packing, layout, backend=self.problem.backend)

    def _fallback(self, request: Request, reason: str) -> Delivery:
        begin = time.monotonic()
        planned = fallback_plan(self.problem.corrected(request.correction), request.batch)
        elapsed = time.monotonic() - begin
        answer = answer_of(planned, search_s=elapsed, ready_ns=time.monotonic_ns())
        return delivery_of(
            answer,
            planned.packing,
            self.problem.layout,
            backend=self.problem.backend,
            fresh=False,
            lead_s=-elapsed,
            reason=reason,
        )


@collector_paused()
def fallback_plan(problem: PlanningProblem, batch: Batch) -> PlannedBatch:
    """Plan a batch by the first fixed heuristic, in milliseconds."""
    problem = problem.whole_backwards().with_search(seed=0, method="portfolio")
    return plan_batch(problem, batch, budget=Budget(evaluations=1))
