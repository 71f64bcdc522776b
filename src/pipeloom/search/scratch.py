"""What a rollout writes: one set of arrays per thread, made once per problem."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.search.problem import Problem

Array = npt.NDArray[Any]


class Scratch(NamedTuple):
    """Arrays that a rollout writes; see `make_scratch`."""

    position: Array
    at: Array
    waiting: Array
    bits: Array
    queue: Array
    late_time: Array
    late_task: Array
    late_count: Array
    late_first: Array
    key: Array
    free_at: Array
    last_kind: Array
    blocked: Array
    work_left: Array
    free: Array
    need: Array
    held: Array
    job_left: Array
    active: Array
    available: Array
    sequence: Array
    start: Array


def make_scratch(problem: Problem) -> Scratch:
    """Arrays for rollouts of one problem; one set per thread."""
    num_tasks, num_segments = len(problem.waiting), len(problem.slot)
    num_ranks, num_jobs = len(problem.room), len(problem.need)
    num_words = (num_segments + 63) // 64 + 1
    per_rank = int(np.bincount(problem.task[:-1, 2] >> 2, minlength=num_ranks).max())

    def ints(*shape: int) -> Array:
        return np.zeros(shape, np.int64)

    return Scratch(
        position=ints(num_segments), at=ints(num_segments), waiting=ints(num_tasks),
        bits=np.zeros((4 * num_ranks, num_words), np.uint64), queue=ints(4 * num_ranks, 2),
        late_time=ints(num_ranks, per_rank), late_task=ints(num_ranks, per_rank), late_count=ints(num_ranks),
        late_first=ints(num_ranks), key=ints(num_ranks), free_at=ints(num_ranks), last_kind=ints(num_ranks),
        blocked=ints(num_ranks), work_left=ints(num_ranks), free=ints(num_ranks), need=ints(num_jobs, num_ranks),
        held=ints(num_jobs, num_ranks), job_left=ints(num_jobs), active=ints(num_jobs),
        available=ints(num_ranks), sequence=ints(num_tasks), start=ints(num_tasks),
    )  # fmt: skip
