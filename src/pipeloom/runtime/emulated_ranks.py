"""Plans on emulated ranks that are processes of this machine: what they take, and what waking late adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from pipeloom.plan import ExecutionPlan
from pipeloom.runtime.emulate import Clock, Step, emulate, step_durations
from pipeloom.runtime.launch import launch
from pipeloom.runtime.transport import TorchTransport
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule, simulate


@dataclass(frozen=True)
class Emulation:
    """A plan, and how long each of its steps is to take in nanoseconds."""

    plan: ExecutionPlan
    durations_ns: dict[Step, int]


@dataclass(frozen=True)
class Execution:
    """What one plan took.

    Attributes
    ----------
    start_ns, end_ns : int
        Of the first and last step of all ranks: of the host's clock where ranks slept, else from 0.
    steps_ns : dict
        How long each step really took.
    """

    start_ns: int
    end_ns: int
    steps_ns: dict[Step, int]

    @property
    def total_ns(self) -> int:
        """Nanoseconds from the first start to the last end."""
        return self.end_ns - self.start_ns


def run_on_ranks(emulations: Sequence[Emulation], num_ranks: int, clock: Clock) -> list[Execution]:
    """Run plans one after the other on as many processes as they have ranks, joined by gloo.

    Messages are real, of 8 bytes each, and on the virtual clock take no time.

    Raises
    ------
    ExecutionError
        A rank fails.
    """
    by_rank = launch(_run_rank, num_ranks, list(emulations), clock)
    found = []
    for on_ranks in zip(*by_rank, strict=True):
        of_plan = [one for one in on_ranks if one is not None]
        steps = {step: ns for one in of_plan for step, ns in one.steps_ns.items()}
        found.append(
            Execution(min(one.start_ns for one in of_plan), max(one.end_ns for one in of_plan), steps)
        )
    return found


def _run_rank(emulations: list[Emulation], clock: Clock) -> list[Execution | None]:
    """On one rank; None where a plan has nothing for it to compute."""
    torch.set_num_threads(1)
    found: list[Execution | None] = []
    for one in emulations:
        dist.barrier()
        times = emulate(one.plan, dist.get_rank(), one.durations_ns, TorchTransport(), clock=clock)
        steps = {each[:4]: each[5] - each[4] for each in times}
        found.append(Execution(times[0].start_ns, times[-1].end_ns, steps) if times else None)
    return found


def without_delays(graph: TaskGraph) -> TaskGraph:
    """The graph where messages take no time and memory has no limit: what sleeping ranks are compared with."""
    return replace(
        graph, edge_delay_ns=np.zeros_like(graph.edge_delay_ns), capacity_bytes=None,
        predecessor_delay_ns=np.zeros_like(graph.predecessor_delay_ns),
        successor_delay_ns=np.zeros_like(graph.successor_delay_ns),
    )  # fmt: skip


def replayed_ns(
    graph: TaskGraph, schedule: Schedule, chunk_names: tuple[str, ...], steps_ns: Mapping[Step, int]
) -> int:
    """What a schedule comes to where every step takes as long as it really took.

    Its difference from the planned time is what waking late costs: the machine's share, not the executor's.

    Parameters
    ----------
    graph : TaskGraph
        Without candidates.
    """
    of_task = step_durations(replace(graph, duration_ns=np.arange(graph.num_tasks)), chunk_names)
    measured = graph.duration_ns.copy()
    for step, task in of_task.items():
        measured[task] = steps_ns[step]
    return simulate(replace(graph, duration_ns=measured), schedule).makespan_ns
