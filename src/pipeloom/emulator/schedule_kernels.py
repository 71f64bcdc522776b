"""Compiled list scheduling for the emulator's schedule."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeloom.compiled import allocating, kernel
from pipeloom.emulator.rules import IntArray

Array = Any


class TaskArrays(NamedTuple):
    """Tasks as arrays without durations, built once for all memory strategies.

    Attributes
    ----------
    rank, microbatch, place : array, shape (num_tasks,)
        Microbatches are numbered without gaps. Of its ready tasks, a rank runs the one with the lowest place.
    waiting : array, shape (num_tasks,)
        Number of tasks to wait for.
    first_start, first : compressed rows
        Tasks of each microbatch that wait for nothing.
    after_start, after, delay_ps : compressed rows
        Tasks that wait for each task, and the delay of its result to each.
    """

    rank: IntArray
    microbatch: IntArray
    place: IntArray
    waiting: IntArray
    first_start: IntArray
    first: IntArray
    after_start: IntArray
    after: IntArray
    delay_ps: IntArray


@kernel
def _push(heap: Array, base: int, size: int, key: int, value: int) -> None:
    """Push (key, value) to a heap of ``size`` pairs that begins at ``base``."""
    at = size
    while at > 0:
        up = (at - 1) >> 1
        k, v = heap[base + up]
        if k < key or (k == key and v <= value):
            break
        heap[base + at, 0], heap[base + at, 1] = k, v
        at = up
    heap[base + at, 0], heap[base + at, 1] = key, value


@kernel
def _pop(heap: Array, base: int, size: int) -> None:
    """Remove the smallest pair, which the caller has read at ``base``."""
    last = size - 1
    key, value = heap[base + last]
    at = 0
    while True:
        down = 2 * at + 1
        if down >= last:
            break
        if down + 1 < last:
            a, b = heap[base + down], heap[base + down + 1]
            if b[0] < a[0] or (b[0] == a[0] and b[1] < a[1]):
                down += 1
        k, v = heap[base + down]
        if key < k or (key == k and value <= v):
            break
        heap[base + at, 0], heap[base + at, 1] = k, v
        at = down
    heap[base + at, 0], heap[base + at, 1] = key, value


@allocating
def run(tasks: TaskArrays, duration: Array, num_ranks: int, in_flight: int) -> tuple[Array, Array]:
    """Run event-driven list scheduling. Every heap orders pairs (time or place, number)."""
    rank, microbatch, place = tasks.rank, tasks.microbatch, tasks.place
    first_start, first = tasks.first_start, tasks.first
    after_start, after, delay = tasks.after_start, tasks.after, tasks.delay_ps
    count, num_microbatches = len(rank), len(first_start) - 1
    waiting = tasks.waiting.copy()
    left = np.bincount(microbatch, minlength=num_microbatches)
    num_tasks = np.bincount(rank, minlength=num_ranks)
    base = np.zeros(num_ranks, np.int64)
    base[1:] = np.cumsum(num_tasks)[:-1]
    # Per rank: tasks ready now (by place) and tasks ready later (by time).
    ready, later = np.empty((count, 2), np.int64), np.empty((count, 2), np.int64)
    num_ready, num_later = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    free, ready_at = np.zeros(num_ranks, np.int64), np.zeros(count, np.int64)
    start, order = np.full(count, -1, np.int64), np.empty(count, np.int64)
    # A task creates an event when it becomes ready and one when it ends. Other events replace one that was popped.
    events, num_events = np.empty((2 * count + 2, 2), np.int64), 0
    leaving, num_leaving = np.empty((num_microbatches + 1, 2), np.int64), 0
    fresh, num_fresh = np.empty(count, np.int64), 0
    entered = done = now = 0
    admit = in_flight
    while True:
        while admit > 0 and entered < num_microbatches:
            for k in range(first_start[entered], first_start[entered + 1]):
                fresh[num_fresh] = first[k]
                ready_at[first[k]] = max(ready_at[first[k]], now)
                num_fresh += 1
            entered += 1
            admit -= 1
        for k in range(num_fresh):
            i = fresh[k]
            r = rank[i]
            _push(later, base[r], num_later[r], ready_at[i], i)
            num_later[r] += 1
            _push(events, 0, num_events, max(ready_at[i], free[r]), r)
            num_events += 1
        num_fresh = admit = 0
        if num_leaving and (num_events == 0 or leaving[0, 0] <= events[0, 0]):
            now = leaving[0, 0]
            _pop(leaving, 0, num_leaving)
            num_leaving -= 1
            admit = 1
            continue
        if num_events == 0:
            break
        now, r = events[0]
        _pop(events, 0, num_events)
        num_events -= 1
        if free[r] > now:
            continue
        while num_later[r] and later[base[r], 0] <= now:
            i = later[base[r], 1]
            _pop(later, base[r], num_later[r])
            num_later[r] -= 1
            _push(ready, base[r], num_ready[r], place[i], i)
            num_ready[r] += 1
        if num_ready[r] == 0:
            if num_later[r]:
                _push(events, 0, num_events, later[base[r], 0], r)
                num_events += 1
            continue
        i = ready[base[r], 1]
        _pop(ready, base[r], num_ready[r])
        num_ready[r] -= 1
        start[i] = now
        order[done] = i
        done += 1
        end = now + duration[i]
        free[r] = end
        for k in range(after_start[i], after_start[i + 1]):
            j = after[k]
            waiting[j] -= 1
            ready_at[j] = max(ready_at[j], end + delay[k])
            if waiting[j] == 0:
                fresh[num_fresh] = j
                num_fresh += 1
        m = microbatch[i]
        left[m] -= 1
        if left[m] == 0:
            _push(leaving, 0, num_leaving, end, m)
            num_leaving += 1
        _push(events, 0, num_events, end, r)
        num_events += 1
    return order[:done], start
