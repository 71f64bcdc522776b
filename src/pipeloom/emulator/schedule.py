"""A plain pipeline order for the emulator's own use: backward first, a bounded number of microbatches in flight.

This is how an iteration is emulated when nobody hands in a schedule (`emulate`, `sweep`). It is list
scheduling in the spirit of 1F1B; the planner's searches are elsewhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class PipelineTask:
    """A stage's forward or backward on one part of a microbatch."""

    rank: int
    microbatch: int
    backward: bool
    duration_ps: int
    held_bytes: int
    """Taken by a forward, given back by its backward."""
    before: list[tuple[int, int]] = field(default_factory=list)
    """Tasks to wait for, and picoseconds that their results travel."""


def successors(tasks: Sequence[PipelineTask]) -> list[list[tuple[int, int]]]:
    """Per task the tasks that wait for it, and picoseconds that its result travels to each."""
    after: list[list[tuple[int, int]]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for source, delay in task.before:
            after[source].append((i, delay))
    return after


def list_schedule(
    tasks: Sequence[PipelineTask],
    num_ranks: int,
    in_flight: int,
    after: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> tuple[list[int], list[int]]:
    """Order tasks greedily.

    A rank that is free runs, of the tasks that are ready, a backward of the earliest microbatch if there is
    one, else a forward of the earliest. A microbatch enters when fewer than ``in_flight`` are between the
    start of their first and the end of their last task, which bounds memory and cannot deadlock. ``after`` is
    what `successors` gives, where it is known already.

    Returns
    -------
    order, start_ps
        Tasks by start time (topological), and the start of each task.
    """
    waiting = [len(t.before) for t in tasks]
    after = successors(tasks) if after is None else after
    left: dict[int, int] = {}
    first: dict[int, list[int]] = {}
    for i, task in enumerate(tasks):
        left[task.microbatch] = left.get(task.microbatch, 0) + 1
        if not task.before:
            first.setdefault(task.microbatch, []).append(i)
    microbatches = sorted(left)
    # Per rank: tasks ready now (by preference) and tasks ready later (by time).
    ready: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    later: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    free, ready_at = [0] * num_ranks, [0] * len(tasks)
    start = [-1] * len(tasks)
    entered = 0
    events: list[tuple[int, int]] = []

    def admit(count: int, now: int) -> None:
        nonlocal entered
        for _ in range(count):
            if entered < len(microbatches):
                for i in first.get(microbatches[entered], ()):
                    push(i, now)
                entered += 1

    def push(i: int, when: int) -> None:
        ready_at[i] = max(ready_at[i], when)
        rank = tasks[i].rank
        heapq.heappush(later[rank], (ready_at[i], i))
        heapq.heappush(events, (max(ready_at[i], free[rank]), rank))

    admit(in_flight, 0)
    order: list[int] = []
    leaving: list[tuple[int, int]] = []
    while events or leaving:
        if leaving and (not events or leaving[0][0] <= events[0][0]):
            now, _ = heapq.heappop(leaving)
            admit(1, now)
            continue
        now, rank = heapq.heappop(events)
        if free[rank] > now:
            continue
        while later[rank] and later[rank][0][0] <= now:
            _, i = heapq.heappop(later[rank])
            heapq.heappush(ready[rank], (0 if tasks[i].backward else 1, tasks[i].microbatch, i))
        if not ready[rank]:
            if later[rank]:
                heapq.heappush(events, (later[rank][0][0], rank))
            continue
        _, _, i = heapq.heappop(ready[rank])
        task = tasks[i]
        start[i] = now
        order.append(i)
        end = now + task.duration_ps
        free[rank] = end
        for j, delay in after[i]:
            waiting[j] -= 1
            ready_at[j] = max(ready_at[j], end + delay)
            if waiting[j] == 0:
                push(j, ready_at[j])
        left[task.microbatch] -= 1
        if left[task.microbatch] == 0:
            heapq.heappush(leaving, (end, task.microbatch))
        heapq.heappush(events, (end, rank))
    return order, start
