"""Emulated ranks: the steps of a plan without computation, so that many ranks run on few cores.

On the virtual clock nothing takes real time. Messages carry the time at which they left. The result is exact, but only
shows that the plan, run step by step, matches the planned times. With sleeping chunks, waiting replaces computation,
and the measured time includes the real cost of executor and messages. Tasks should then last at least 20 to 40 ms.
Never report either as measured training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import ExecutionError, InputError
from pipeloom.plan import Action, ExecutionPlan, Verb
from pipeloom.plan.messages import messages_of
from pipeloom.runtime.execute.result import ActionTime
from pipeloom.runtime.launch.processes import launch
from pipeloom.runtime.launch.transport import Handle, TorchTransport, Transport
from pipeloom.spec import DTYPE_BYTES
from pipeloom.taskgraph import KIND_NAMES, TaskGraph
from pipeloom.timeline import Schedule, simulate

Clock = Literal["virtual", "sleep"]
Step = tuple[str, str, int, int]
"""Verb, chunk, microbatch, sub-microbatch of a compute action."""


def step_durations(graph: TaskGraph, chunk_names: tuple[str, ...]) -> dict[Step, int]:
    """Return the nanoseconds of every compute action from a graph built for the layout with these chunks."""
    if graph.labels is None:
        raise InputError("graph.labels", "is null", "give a graph that was built from a layout and a packing")
    durations = {}
    for kind, pair, duration in zip(graph.kind.tolist(), graph.pair.tolist(), graph.duration_ns.tolist(), strict=True):
        label = graph.labels[pair]
        durations[KIND_NAMES[kind], chunk_names[label.chunk], label.microbatch, label.sub_microbatch] = duration
    return durations


def step_tasks(graph: TaskGraph, chunk_names: tuple[str, ...]) -> dict[Step, int]:
    """Return the task of every compute action, as `step_durations`."""
    return step_durations(replace(graph, duration_ns=np.arange(graph.num_tasks)), chunk_names)


def emulate(
    plan: ExecutionPlan,
    rank: int,
    durations_ns: Mapping[Step, int],
    transport: Transport,
    *,
    clock: Clock = "virtual",
    transfer_ns: Callable[[int], int] = lambda _: 0,
) -> tuple[ActionTime, ...]:
    """Run one rank's actions without computing.

    Parameters
    ----------
    durations_ns : mapping
        See `step_durations`.
    transport : Transport
        Carries 8 bytes for each message of any shape.
    transfer_ns : callable
        Returns the transfer time of a message in nanoseconds from its bytes. With sleeping chunks, the receiver waits
        until so long after the message was posted, so all ranks must be on one host.

    Returns
    -------
    tuple of ActionTime
        The compute actions in the rank's order. They start at 0 on the virtual clock, else on the host's monotonic
        clock.
    """
    return _EmulatedRank(plan, rank, durations_ns, transport, clock, transfer_ns).run()


class _EmulatedRank:
    def __init__(
        self,
        plan: ExecutionPlan,
        rank: int,
        durations_ns: Mapping[Step, int],
        transport: Transport,
        clock: Clock,
        transfer_ns: Callable[[int], int],
    ) -> None:
        self.actions, self.rank, self.transport, self.clock = plan.ranks[rank], rank, transport, clock
        self.durations_ns, self.transfer_ns = durations_ns, transfer_ns
        self.messages = messages_of(plan)[rank]
        self.posted: dict[tuple[Verb, int], tuple[Handle, Tensor, int]] = {}
        """By the verb that waits for it: handle, payload, nanoseconds under way."""
        self.now_ns = 0
        self.times: list[ActionTime] = []

    def run(self) -> tuple[ActionTime, ...]:
        for action, message in zip(self.actions, self.messages, strict=True):
            if action.verb.is_compute:
                self._compute(action)
            elif message is not None and action.shape is not None:
                self._post(action, message)
            elif message is not None:
                self._wait(action, message)
        return tuple(self.times)

    def _compute(self, action: Action) -> None:
        step = (action.verb, action.chunk, action.microbatch, action.sub_microbatch)
        if step not in self.durations_ns:
            raise ExecutionError(f"rank {self.rank}: the graph has no task for {' '.join(map(str, step))}")
        duration = self.durations_ns[step]
        if self.clock == "sleep":
            begin = time.monotonic_ns()
            time.sleep(duration / 1e9)
            end = time.monotonic_ns()
        else:
            begin, end = self.now_ns, self.now_ns + duration
            self.now_ns = end
        self.times.append(ActionTime(action.verb, *step[1:], begin, end))

    def _post(self, action: Action, message: int) -> None:
        assert action.peer is not None
        assert action.shape is not None
        now_ns = time.monotonic_ns() if self.clock == "sleep" else self.now_ns
        payload = torch.tensor([now_ns], dtype=torch.int64)
        post = self.transport.send if action.verb.is_send else self.transport.receive
        under_way = self.transfer_ns(math.prod(action.shape) * DTYPE_BYTES[action.dtype])
        self.posted[action.verb.wait, message] = (post(payload, action.peer, message), payload, under_way)

    def _wait(self, action: Action, message: int) -> None:
        handle, payload, under_way = self.posted.pop((action.verb, message))
        handle.wait()
        if action.verb.post.is_receive and self.clock == "virtual":
            self.now_ns = max(self.now_ns, int(payload) + under_way)
        elif action.verb.post.is_receive and under_way:
            time.sleep(max(0, int(payload) + under_way - time.monotonic_ns()) / 1e9)


@dataclass(frozen=True)
class Emulation:
    """A plan, the duration of each of its steps, and what a message takes: a latency, and a time for each byte."""

    plan: ExecutionPlan
    durations_ns: dict[Step, int]
    latency_ns: float = 0.0
    ns_per_byte: float = 0.0

    def transfer_ns(self, num_bytes: int) -> int:
        """Return the nanoseconds of a message."""
        return round(self.latency_ns + num_bytes * self.ns_per_byte)


@dataclass(frozen=True)
class Execution:
    """Times of one executed plan."""

    start_ns: int
    end_ns: int
    """Start of the first and end of the last step of all ranks: on the host's clock if ranks slept, else from 0."""
    moments_ns: dict[Step, tuple[int, int]]
    """Start and end of each step."""

    @property
    def steps_ns(self) -> dict[Step, int]:
        """Real duration of each step."""
        return {step: end - start for step, (start, end) in self.moments_ns.items()}

    @property
    def total_ns(self) -> int:
        """Nanoseconds from the first start to the last end."""
        return self.end_ns - self.start_ns


def run_on_ranks(emulations: Sequence[Emulation], num_ranks: int, clock: Clock) -> list[Execution]:
    """Run plans one after the other on one process per rank, joined by gloo. Messages are real with 8 bytes each.

    Raises `ExecutionError` if a rank fails.
    """
    return joined_executions(launch(run_in_turn, num_ranks, list(emulations), clock))


def joined_executions(by_rank: Sequence[Sequence[Execution | None]]) -> list[Execution]:
    """Join what each rank returned from `run_in_turn`."""
    executions = []
    for on_ranks in zip(*by_rank, strict=True):
        of_plan = [one for one in on_ranks if one is not None]
        moments = {step: pair for one in of_plan for step, pair in one.moments_ns.items()}
        executions.append(Execution(min(one.start_ns for one in of_plan), max(one.end_ns for one in of_plan), moments))
    return executions


def run_in_turn(emulations: Sequence[Emulation], clock: Clock) -> list[Execution | None]:
    """Run plans on this rank of the default process group. The result is None for a plan without computation for it."""
    executions: list[Execution | None] = []
    for emulation in emulations:
        dist.barrier()
        times = emulate(
            emulation.plan,
            dist.get_rank(),
            emulation.durations_ns,
            TorchTransport(),
            clock=clock,
            transfer_ns=emulation.transfer_ns,
        )
        moments: dict[Step, tuple[int, int]] = {each[:4]: (each[4], each[5]) for each in times}
        executions.append(Execution(times[0].start_ns, times[-1].end_ns, moments) if times else None)
    return executions


def without_delays(graph: TaskGraph) -> TaskGraph:
    """Return the graph without message delays and memory limit, for comparison with sleeping ranks."""
    return replace(
        graph,
        edge_delay_ns=np.zeros_like(graph.edge_delay_ns),
        capacity_bytes=None,
        predecessor_delay_ns=np.zeros_like(graph.predecessor_delay_ns),
        successor_delay_ns=np.zeros_like(graph.successor_delay_ns),
    )


def replayed_ns(
    graph: TaskGraph, schedule: Schedule, chunk_names: tuple[str, ...], steps_ns: Mapping[Step, int]
) -> int:
    """Return the makespan of a schedule whose steps take their real durations. The graph has no candidates.

    Its difference from the planned time is due to late wake-ups of the machine, not to the executor.
    """
    measured = graph.duration_ns.copy()
    for step, task in step_tasks(graph, chunk_names).items():
        measured[task] = steps_ns[step]
    return simulate(replace(graph, duration_ns=measured), schedule).makespan_ns
