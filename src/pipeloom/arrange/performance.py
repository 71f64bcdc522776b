"""AdaPtis' performance model (Algorithm 1): time and memory of every device, in parts."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.taskgraph import WEIGHT_GRADIENT, TaskGraph
from pipeloom.timeline import Schedule, Timeline


@dataclass(frozen=True, slots=True)
class DevicePerformance:
    """One device: ``compute + communication + bubble - overlap`` is the iteration.

    Attributes
    ----------
    compute_ns : int
    communication_ns : int
        Of all messages that the device receives.
    bubble_ns : int
        Idle time, but for what is spent waiting on a message under way.
    overlap_ns : int
        Communication behind other work or behind a bubble.
    activation_bytes, gradient_bytes : int
        Largest sums held from forwards to (input) backwards, and from there to weight gradients; they need not be
        reached at the same time.
    weight_bytes : int
        Weights, gradients and optimiser state.
    peak_bytes : int
        Largest memory in all.
    """

    compute_ns: int
    communication_ns: int
    bubble_ns: int
    overlap_ns: int
    activation_bytes: int
    gradient_bytes: int
    weight_bytes: int
    peak_bytes: int


def performance(graph: TaskGraph, schedule: Schedule, timeline: Timeline) -> tuple[DevicePerformance, ...]:
    """Take an iteration apart by device (Algorithm 1, steps 2 and 3).

    Parameters
    ----------
    graph : TaskGraph
    schedule : Schedule
    timeline : Timeline
        Of that schedule.
    """
    chosen = graph.with_candidates(schedule.candidate)
    start, end = timeline.start_ns.tolist(), timeline.end_ns.tolist()
    found = []
    for rank, order in enumerate(schedule.order):
        compute = communication = exposed = free = 0
        held = late = most_held = most_late = 0
        for task in order.tolist():
            row = range(int(graph.predecessor_start[task]), int(graph.predecessor_start[task + 1]))
            messages = [
                (end[int(graph.predecessor[e])], int(graph.predecessor_delay_ns[e]))
                for e in row
                if graph.rank[graph.predecessor[e]] != rank
            ]
            communication += sum(delay for _, delay in messages)
            # Of the gap before this task, what the last message was still under way.
            sent = max((at for at, delay in messages if at + delay == start[task]), default=start[task])
            exposed += max(0, start[task] - max(free, sent))
            free = end[task]
            compute += end[task] - start[task]
            pair, kind = int(graph.pair[task]), int(graph.kind[task])
            split = graph.weight_of[pair] >= 0
            if task == graph.forward_of[pair]:
                held += int(chosen.activation_bytes[pair])
                most_held = max(most_held, held)
            if task == graph.backward_of[pair] or (kind == 0 and graph.backward_of[pair] < 0):
                held -= int(chosen.activation_bytes[pair])
                late += int(chosen.weight_gradient_bytes[pair]) if split else 0
                most_late = max(most_late, late)
            elif kind == WEIGHT_GRADIENT:
                late -= int(chosen.weight_gradient_bytes[pair])
        idle = timeline.makespan_ns - compute
        found.append(DevicePerformance(
            compute, communication, idle - exposed, communication - exposed, most_held, most_late,
            int(graph.static_bytes[rank]), int(timeline.peak_bytes[rank]),
        ))  # fmt: skip
    return tuple(found)
