"""Batches of a run under each system, on ranks that wait instead of computing.

Ranks that share cores slow each other down, so the times of real computation say little about schedules there. Waiting
needs no core. The ranks of the run send real messages of 8 bytes, and wait for the time that a task or a message takes
by the run's costs, stretched so that waking up late hardly counts.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

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


class WaitingRun(NamedTuple):
    """One batch under one system on waiting ranks, planned and as measured, in the time of the costs."""

    result: BaselineResult
    measured: Timeline


class WaitedSystems(NamedTuple):
    """Some batches under each system on waiting ranks, which waited longer than the costs say by ``stretch``."""

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

    ``systems`` are results on the same batches, with their packings. Take about this many ``seconds``, but run at least
    one batch. At ``compared``, the other ranks wait until this one has planned the batches under each system. Return
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
    results = [_with_strategies(systems[name][batch]) for name, batch in turns]
    by_rank = _run_everywhere([_emulation(result, problem, stretch) for result in results])
    if not results:
        return None
    found: dict[str, list[WaitingRun]] = {name: [] for name in systems}
    for (name, _), result, execution in zip(turns, results, joined_executions(by_rank), strict=True):
        found[name].append(WaitingRun(result, _measured(result, execution, stretch)))
    return WaitedSystems(found, stretch)


def _chosen(systems: Systems, seconds: float) -> list[int]:
    """Return evenly spaced batches that take about this long under all systems together."""
    per_batch = [sum(one.iteration_s for one in results) for results in zip(*systems.values(), strict=True)]
    if not per_batch:
        return []
    number = int(seconds / (sum(per_batch) / len(per_batch)))
    places = np.linspace(0, len(per_batch) - 1, min(max(1, number), len(per_batch)))
    return [*dict.fromkeys(map(round, places.tolist()))]


def _with_strategies(result: BaselineResult) -> BaselineResult:
    """Return the result with the chosen candidates in its graph."""
    graph = result.graph.with_candidates(result.schedule.candidate)
    return replace(result, graph=graph, schedule=Schedule(result.schedule.order, None, result.name))


def _emulation(result: BaselineResult, problem: PlanningProblem, stretch: float) -> Emulation:
    assert result.packing is not None
    layout, graph, link = result.layout, result.graph, problem.profile_costs.rank
    shapes = boundary_shapes(problem.model, layout)
    plan = lower(graph, result.schedule, result.timeline, layout, result.packing, shapes)
    durations = step_durations(graph, layout.chunk_names)
    stretched = {step: round(duration * stretch) for step, duration in durations.items()}
    return Emulation(plan, stretched, stretch * link.link_latency_s * 1e9, stretch * 1e9 / link.link_bytes_per_s)


def _measured(result: BaselineResult, found: Execution, stretch: float) -> Timeline:
    graph = result.graph
    task_of = step_tasks(graph, result.layout.chunk_names)
    start, end = np.zeros(graph.num_tasks, np.int64), np.zeros(graph.num_tasks, np.int64)
    for step, (begin, until) in found.moments_ns.items():
        start[task_of[step]] = round((begin - found.start_ns) / stretch)
        end[task_of[step]] = round((until - found.start_ns) / stretch)
    return Timeline(start, end, result.timeline.peak_bytes)
