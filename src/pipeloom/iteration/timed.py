"""`TimedIteration`: one simulated iteration, from the first pass to the last weight update."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeloom.taskgraph import NS_PER_S, IntArray, TaskGraph
from pipeloom.timeline import Schedule, Timeline


@dataclass(frozen=True, eq=False)
class TimedIteration:
    """A schedule of a task graph with its simulated times, the updates after it, and memory beside activations.

    Attributes
    ----------
    update_ns : array, shape (num_ranks,)
        Time that each rank needs after its last task, to reduce gradients and update weights.
    other_bytes : array, shape (num_ranks,)
        Memory of each rank that the graph does not count: workspace of the largest pass, and messages.
    capacity_bytes : int
        Memory of each device.
    """

    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    update_ns: IntArray
    other_bytes: IntArray
    capacity_bytes: int

    @cached_property
    def iteration_s(self) -> float:
        """Seconds of the iteration. A rank updates its weights as soon as its last task ends."""
        end = np.zeros(self.graph.num_ranks, np.int64)
        np.maximum.at(end, self.graph.rank, self.timeline.end_ns)
        return int((end + self.update_ns).max()) / NS_PER_S

    @property
    def pipeline_s(self) -> float:
        """Seconds until the last task ends."""
        return self.timeline.makespan_ns / NS_PER_S

    @property
    def bubble_share(self) -> float:
        """Mean share of the pipeline's time in which a rank is idle."""
        work = int((self.timeline.end_ns - self.timeline.start_ns).sum())
        return 1 - work / (self.graph.num_ranks * self.timeline.makespan_ns)

    @property
    def static_bytes(self) -> IntArray:
        """Weights, gradients and optimizer state of each rank, shape (num_ranks,)."""
        return self.graph.static_bytes

    @property
    def peak_bytes(self) -> IntArray:
        """Peak memory of each rank, shape (num_ranks,): static memory, activations, workspace and messages."""
        return self.timeline.peak_bytes + self.other_bytes

    @property
    def fits(self) -> bool:
        """Whether every rank fits into memory."""
        return bool(self.peak_bytes.max() <= self.capacity_bytes)

    @property
    def in_flight(self) -> int:
        """Largest number of microbatches between the start of their first and the end of their last task."""
        numbers, microbatch = np.unique(self.graph.microbatch, return_inverse=True)
        count = len(numbers)
        start, end = np.full(count, self.timeline.makespan_ns), np.zeros(count, np.int64)
        np.minimum.at(start, microbatch, self.timeline.start_ns)
        np.maximum.at(end, microbatch, self.timeline.end_ns)
        moments = np.concatenate([end, start])  # at equal times, microbatches end before others start
        changes = np.repeat([-1, 1], count)
        return int(np.cumsum(changes[np.argsort(moments, kind="stable")]).max())
