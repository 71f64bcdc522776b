"""The planner process: reads metadata and writes plans ahead of training.

It communicates through a small key-value protocol, so that planning does not need torch; the TCPStore behind it is part
of the runtime. Keys: ``setup`` (once), ``request/i`` and ``answer/i`` for each iteration, ``latest`` (the newest
request), ``ready`` (kernels are compiled) and ``stop``. If there is no plan, the answer is empty and ``error/i`` holds
the reason.
"""

from __future__ import annotations

import gc
import time
from contextlib import suppress
from typing import Protocol

from pipeloom.errors import PipeloomError
from pipeloom.plan import Answer
from pipeloom.planner.messages import Request, answer_of, decode, encode
from pipeloom.planner.planning import FinishingTime, plan_batch
from pipeloom.planner.problem import PlanningProblem
from pipeloom.planner.problem_file import decode_problem
from pipeloom.planner.replicas import assign_planned
from pipeloom.search import Budget

READY, STOP, SETUP, LATEST = "ready", "stop", "setup", "latest"
# Each check costs both sides about 0.1 ms of a core.
_POLL_S = 0.005


class Store(Protocol):
    """A key-value store that two processes share."""

    def put(self, key: str, value: bytes) -> None:
        """Set a key."""
        ...

    def take(self, key: str) -> bytes | None:
        """Return and remove the value of a key; return None at once if there is none."""
        ...

    def peek(self, key: str) -> bytes | None:
        """Return the value of a key without removing it; return None at once if there is none."""
        ...


def request_key(iteration: int) -> str:
    """Return the key of the metadata for an iteration."""
    return f"request/{iteration}"


def answer_key(iteration: int) -> str:
    """Return the key of the plan for an iteration."""
    return f"answer/{iteration}"


def error_key(iteration: int) -> str:
    """Return the key of the reason why an iteration has no plan."""
    return f"error/{iteration}"


def serve(store: Store) -> int:
    """Answer the newest request until ``stop`` is set; return the number of plans.

    Older requests are skipped, because their iterations have begun with fallback plans when a newer request arrives.
    """
    data = None
    while data is None:
        if store.peek(STOP) is not None:
            return 0
        data = store.peek(SETUP)
        if data is None:
            time.sleep(_POLL_S)
    problem = decode_problem(data)
    problem.compile_kernels()
    # The objects created so far live until the end, so exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    store.put(READY, b"1")
    answered, num_plans, finishing = b"", 0, FinishingTime()
    while store.peek(STOP) is None:
        latest = store.peek(LATEST)
        data = None if latest is None or latest == answered else store.take(request_key(int(latest)))
        if latest is None or data is None:
            time.sleep(_POLL_S)
            continue
        answered, iteration = latest, int(latest)
        try:
            answer = answer_request(problem, decode(Request, data), finishing)
        except PipeloomError as error:
            _reject(store, iteration, str(error))
        except Exception as error:
            # An unexpected error affects only this batch. If the process exited, every batch until its restart would
            # run on a fallback plan.
            _reject(store, iteration, f"a defect, {type(error).__name__}: {error}")
        else:
            store.put(answer_key(iteration), encode(answer))
            num_plans += 1
    return num_plans


def _reject(store: Store, iteration: int, reason: str) -> None:
    store.put(error_key(iteration), reason.encode())
    store.put(answer_key(iteration), b"")


def answer_request(problem: PlanningProblem, request: Request, finishing: FinishingTime | None = None) -> Answer:
    """Plan one batch, and assign the batch after it to replicas if requested. ``finishing`` is passed to `plan_batch`.

    The same request gives the same plan, except that the deadline may end the search at different points.
    """
    begin = time.monotonic()
    corrected, budget_s = problem.corrected(request.correction), problem.budget_s
    assigned: tuple[int, ...] = ()
    if request.ahead is not None:
        # Errors of that batch are reported when it is planned. If the assignment fails, samples are assigned by load.
        part = problem.search.packings.dealing_share * budget_s
        with suppress(PipeloomError):
            assignment = assign_planned(
                corrected, request.ahead, budget=Budget(seconds=part), corrections=request.replicas
            )
            assigned = assignment.replicas if assignment.predicted else ()
        # This plan is needed first, so an assignment that took too long does not reduce its budget further.
        budget_s -= min(part, time.monotonic() - begin)
    planned = plan_batch(corrected, request.batch, budget=Budget(seconds=budget_s), finishing=finishing)
    return answer_of(
        planned, search_s=time.monotonic() - begin, ready_ns=time.monotonic_ns(), replica_of_sample=assigned
    )
