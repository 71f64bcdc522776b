"""Emulated ranks: a plan's steps without its computation, so that many ranks run on few cores.

On the virtual clock nothing takes real time: messages carry the time at which they left, and the result is
exact, but only shows that the plan, run step by step, is what was planned. With sleeping chunks computation is
replaced by waiting, and what is measured includes what executor and messages really cost; tasks should then
last 20 to 40 ms and more. Neither is ever to be reported as measured training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from pipeloom.errors import ExecutionError, InputError
from pipeloom.plan import COMPUTE_VERBS, Action, ExecutionPlan
from pipeloom.plan.messages import messages_of
from pipeloom.runtime.result import ActionTime
from pipeloom.runtime.transport import Handle, Transport
from pipeloom.spec import DTYPE_BYTES
from pipeloom.taskgraph import KIND_NAMES, TaskGraph

Clock = Literal["virtual", "sleep"]
Step = tuple[str, str, int, int]
"""Verb, chunk, microbatch, sub-microbatch of a compute action."""


def step_durations(graph: TaskGraph, chunk_names: tuple[str, ...]) -> dict[Step, int]:
    """Nanoseconds of every compute action, from a graph built for the layout with these chunks."""
    if graph.labels is None:
        raise InputError("graph.labels", "is null", "give a graph that was built from a layout and a packing")
    durations = {}
    for kind, pair, duration in zip(
        graph.kind.tolist(), graph.pair.tolist(), graph.duration_ns.tolist(), strict=True
    ):
        label = graph.labels[pair]
        durations[KIND_NAMES[kind], chunk_names[label.chunk], label.microbatch, label.sub_microbatch] = (
            duration
        )
    return durations


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
    plan : ExecutionPlan
    rank : int
    durations_ns : mapping
        See `step_durations`.
    transport : Transport
        Carries 8 bytes for each message, whatever its shape.
    clock : {"virtual", "sleep"}
    transfer_ns : callable
        From a message's bytes to its nanoseconds under way; on the virtual clock only.

    Returns
    -------
    tuple of ActionTime
        The compute actions in the rank's order: from 0 on the virtual clock, else on the host's monotonic one.
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
        self.messages = messages_of(plan).rows[rank]
        self.posted: dict[tuple[str, int], tuple[Handle, Tensor, int]] = {}
        """By the verb that waits for it: handle, payload, nanoseconds under way."""
        self.now_ns = 0
        self.times: list[ActionTime] = []

    def run(self) -> tuple[ActionTime, ...]:
        for action, message in zip(self.actions, self.messages, strict=True):
            if action.verb in COMPUTE_VERBS:
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
        self.times.append(ActionTime(*step, begin, end))

    def _post(self, action: Action, message: int) -> None:
        assert action.peer is not None
        assert action.shape is not None
        payload = torch.tensor([self.now_ns], dtype=torch.int64)
        sends = action.verb[0] == "S"
        post = self.transport.send if sends else self.transport.receive
        under_way = self.transfer_ns(math.prod(action.shape) * DTYPE_BYTES[action.dtype])
        waits = ("D" if sends else "W") + action.verb[1]
        self.posted[waits, message] = (post(payload, action.peer, message), payload, under_way)

    def _wait(self, action: Action, message: int) -> None:
        handle, payload, under_way = self.posted.pop((action.verb, message))
        handle.wait()
        if action.verb[0] == "W":
            self.now_ns = max(self.now_ns, int(payload) + under_way)
