"""Schedule, Timeline and LowerBound."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from pipeloom.taskgraph import IntArray, TaskGraph


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The order of tasks on each rank, and the memory strategy of every pair.

    Attributes
    ----------
    order : tuple of array
        Task numbers per rank, in running order.
    candidate : array, shape (num_pairs,), or None
        Index of the chosen candidate of each pair; None if the graph has no candidates.
    method : str
        Method that made it, such as ``1f1b`` or ``local search``.
    """

    order: tuple[IntArray, ...]
    candidate: IntArray | None = None
    method: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Start and end of every task, planned or measured.

    Attributes
    ----------
    start_ns, end_ns : array, shape (num_tasks,)
        Start and end of every task.
    peak_bytes : array, shape (num_ranks,)
        Peak memory of each rank, static bytes included.
    """

    start_ns: IntArray
    end_ns: IntArray
    peak_bytes: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def makespan_ns(self) -> int:
        """Time from zero to the end of the last task."""
        return int(self.end_ns.max())


@dataclass(frozen=True, slots=True)
class LowerBound:
    """A lower bound ``ns`` on the makespan; ``name`` is the argument that proves it."""

    ns: int
    name: str


def gap(makespan_ns: int, bound_ns: int, name: str = "") -> float:
    """Return the makespan divided by the lower bound, minus one; 0 if the bound is 0. Errors give the bound's name.

    Raises
    ------
    AssertionError
        The makespan is below the bound, so the bound is wrong. Python's ``-O`` does not skip this check.
    """
    if makespan_ns < bound_ns:
        proof = f" ({name})" if name else ""
        raise AssertionError(f"the makespan of {makespan_ns} ns is below its lower bound of {bound_ns} ns{proof}")
    return makespan_ns / bound_ns - 1.0 if bound_ns else 0.0


def random_schedule(rng: random.Random, graph: TaskGraph) -> Schedule:
    """Return a random topological order and a random strategy for every pair, for tests of execution.

    Memory limits are ignored.
    """
    waiting = np.diff(graph.predecessor_start).tolist()
    ready = [t for t, n in enumerate(waiting) if n == 0]
    order: list[list[int]] = [[] for _ in range(graph.num_ranks)]
    while ready:
        task = ready.pop(rng.randrange(len(ready)))
        order[int(graph.rank[task])].append(task)
        for i in range(graph.successor_start[task], graph.successor_start[task + 1]):
            after = int(graph.successor[i])
            waiting[after] -= 1
            if waiting[after] == 0:
                ready.append(after)
    candidate = None
    if graph.candidates is not None:
        candidate = np.array([rng.randrange(len(options)) for options in graph.candidates])
    return Schedule(tuple(np.array(tasks, dtype=np.int64) for tasks in order), candidate)
