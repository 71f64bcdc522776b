"""Batches of a run under each system, on ranks that wait instead of computing.

Ranks that share cores slow each other down, so the times of real computation say little about schedules there. Waiting
needs no core. The ranks of the run send real messages of 8 bytes, and wait for the time that a task or a message takes
by the run's costs, stretched so that waking up late hardly counts.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist

from pipeloom.compare.result import BaselineResult
from pipeloom.plan import boundary_shapes, lower
from pipeloom.planner import PlanningProblem
from pipeloom.runtime import step_durations
from pipeloom.runtime.launch.coordination import LongBarrier
from pipeloom.runtime.measure.emulation import Emulation, Execution, joined_executions, run_in_turn, step_tasks
from pipeloom.timeline import Schedule, Timeline
from pipeloom.training.record import WaitingRanks

MEAN_TASK_S = 0.02
"""Mean duration of a task, to which durations are stretched. The machine wakes a rank up to a millisecond late."""
Systems = Mapping[str, Sequence[BaselineResult]]
RunWaiting = Callable[[Systems, PlanningProblem], "WaitedSystems | None"]


@dataclass(frozen=True)
class WaitingRun:
    """One batch under one system on waiting ranks, in the time of the costs.

    Attributes
    ----------
    result : BaselineResult
        With the planned timeline.
    measured : Timeline
        As the ranks ran it.
    """

    result: BaselineResult
    measured: Timeline


@dataclass(frozen=True)
class WaitedSystems:
    """Some batches under each system on waiting ranks.

    Attributes
    ----------
    systems : dict
        By name, one element for each batch.
    stretch : float
        Factor by which the ranks waited longer than the costs say.
    """

    systems: dict[str, list[WaitingRun]]
    stretch: float

    @property
    def means(self) -> WaitingRanks:
        """The mean seconds of each system, as ``summary.json`` has them."""
        planned = {name: _mean_s([one.result.timeline for one in runs]) for name, runs in self.systems.items()}
        measured = {name: _mean_s([one.measured for one in runs]) for name, runs in self.systems.items()}
        return WaitingRanks(planned, measured, len(next(iter(self.systems.values()))), self.stretch)


def _mean_s(timelines: Sequence[Timeline]) -> float:
    return sum(each.makespan_ns for each in timelines) / len(timelines) / 1e9


def take_part(compared: LongBarrier) -> None:
    """Wait in place of computing, on a rank that does not compare systems; see `run_waiting`."""
    compared.wait("comparing with 1F1B")
    _hosts()
    _run_everywhere([])


def _hosts() -> list[str]:
    """Return the hosts of all ranks."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts


def _run_everywhere(emulations: list[Emulation]) -> list[list[Execution | None]]:
    """Run rank 0's emulations on all ranks. Return what each rank ran on rank 0, and nothing on the others."""
    shared = [emulations]
    dist.broadcast_object_list(shared, src=0)
    by_rank: list[list[Execution | None]] = [[] for _ in range(dist.get_world_size())] if not dist.get_rank() else []
    dist.gather_object(run_in_turn(shared[0], "sleep"), by_rank or None, dst=0)
    return by_rank


def run_waiting(
    systems: Systems, problem: PlanningProblem, seconds: float, compared: LongBarrier
) -> WaitedSystems | None:
    """Run batches under each system on all ranks of the default process group, which call `take_part` at this time.

    Parameters
    ----------
    systems : mapping
        Results of each system on the same batches, with their packings.
    problem : PlanningProblem
        That of the results.
    seconds : float
        About how long this takes. At least one batch runs.
    compared : LongBarrier
        At which the other ranks wait until this one has planned the batches under each system.

    Returns
    -------
    WaitedSystems or None
        None if the ranks are on several hosts, whose clocks differ, or if there is no batch.
    """
    compared.wait("comparing with 1F1B")
    hosts = _hosts()
    tasks_s = [task / 1e9 for results in systems.values() for one in results for task in one.graph.duration_ns.tolist()]
    stretch = max(1.0, MEAN_TASK_S * len(tasks_s) / max(sum(tasks_s), 1e-9))
    chosen = [] if len(set(hosts)) > 1 else _chosen(systems, seconds / stretch)
    # Each system goes first in turn.
    names = [*systems]
    turns = [(names[(turn + i) % len(names)], batch) for i, batch in enumerate(chosen) for turn in range(len(names))]
    runs = [_Run.of(systems[name][batch], problem, stretch) for name, batch in turns]
    by_rank = _run_everywhere([run.emulation for run in runs])
    if not runs:
        return None
    found: dict[str, list[WaitingRun]] = {name: [] for name in systems}
    for (name, _), run, execution in zip(turns, runs, joined_executions(by_rank), strict=True):
        found[name].append(run.waited(execution))
    return WaitedSystems(found, stretch)


def _chosen(systems: Systems, seconds: float) -> list[int]:
    """Return evenly spaced batches that take about this long under all systems together."""
    per_batch = [sum(one.iteration_s for one in results) for results in zip(*systems.values(), strict=True)]
    if not per_batch:
        return []
    number = int(seconds / (sum(per_batch) / len(per_batch)))
    places = np.linspace(0, len(per_batch) - 1, min(max(1, number), len(per_batch)))
    return [*dict.fromkeys(map(round, places.tolist()))]


@dataclass(frozen=True)
class _Run:
    """A system's plan of one batch."""

    result: BaselineResult
    emulation: Emulation
    stretch: float

    @classmethod
    def of(cls, result: BaselineResult, problem: PlanningProblem, stretch: float) -> _Run:
        assert result.packing is not None
        layout, graph = result.layout, result.graph.with_candidates(result.schedule.candidate)
        schedule = Schedule(result.schedule.order, None, result.name)
        shapes = boundary_shapes(problem.model, layout)
        plan = lower(graph, schedule, result.timeline, layout, result.packing, shapes)
        durations = step_durations(graph, layout.chunk_names)
        stretched = {step: round(duration * stretch) for step, duration in durations.items()}
        link = problem.profile_costs.rank
        emulation = Emulation(
            plan, stretched, stretch * link.link_latency_s * 1e9, stretch * 1e9 / link.link_bytes_per_s
        )
        return cls(replace(result, graph=graph, schedule=schedule), emulation, stretch)

    def waited(self, found: Execution) -> WaitingRun:
        graph = self.result.graph
        task_of = step_tasks(graph, self.result.layout.chunk_names)
        start, end = np.zeros(graph.num_tasks, np.int64), np.zeros(graph.num_tasks, np.int64)
        for step, (begin, until) in found.moments_ns.items():
            start[task_of[step]] = round((begin - found.start_ns) / self.stretch)
            end[task_of[step]] = round((until - found.start_ns) / self.stretch)
        return WaitingRun(self.result, Timeline(start, end, self.result.timeline.peak_bytes))
