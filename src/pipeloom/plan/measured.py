"""Measured: the times of every action of a plan, and of its messages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.cost import fit_link
from pipeloom.plan.action import ExecutionPlan, Verb
from pipeloom.plan.messages import messages_of
from pipeloom.spec import DTYPE_BYTES, host_pair
from pipeloom.taskgraph import IntArray

# If a wait is shorter than this, in ns or as a share of the time since the message could leave, the message had already
# arrived. Its transfer time is then unknown.
_WAITED_NS, _WAITED_SHARE = 20_000, 0.05


class MessageTime(NamedTuple):
    """Measured times of one message between two ranks."""

    sender: int
    receiver: int
    num_bytes: int
    sent_ns: int
    """Time when the later of its send and receive was posted. The message cannot leave earlier."""
    wait_ns: int
    """Time when the receiver began to wait."""
    arrived_ns: int
    """Time when the wait ended."""

    @property
    def was_waited_for(self) -> bool:
        """Whether the receiver waited for the message, so that its transfer time is known."""
        least = max(_WAITED_NS, _WAITED_SHARE * self.under_way_ns)
        return self.arrived_ns - self.wait_ns > least and self.arrived_ns > self.sent_ns

    @property
    def under_way_ns(self) -> int:
        """Time between the earliest possible departure and the end of the wait; at least 0."""
        return max(0, self.arrived_ns - self.sent_ns)


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Times of every action of every rank, relative to the first computation.

    Attributes
    ----------
    times_ns : tuple of arrays (actions, 2)
        Start and end of each action, by rank. Clocks of ranks are comparable on one machine only.
    cpu_ns : tuple of int
        CPU time of the thread that ran the actions, by rank; -1 if another device than the CPU computed.
    """

    times_ns: tuple[IntArray, ...]
    cpu_ns: tuple[int, ...]

    def compute_ns(self, plan: ExecutionPlan) -> tuple[tuple[int, int], ...]:
        """Return start and end of the compute actions, rank by rank, in the order of each rank.

        As in planned tasks, the times include recomputation and loads before a computation and an offload after it, but
        not the waits in between.
        """
        found: list[tuple[int, int]] = []
        for actions, times in zip(plan.ranks, self.times_ns, strict=True):
            before, here = 0, len(found)
            for action, (start, end) in zip(actions, times.tolist(), strict=True):
                if action.verb.is_compute:
                    found.append((start - before, end))
                    before = 0
                elif action.verb is Verb.OFFLOAD and len(found) > here:
                    found[-1] = (found[-1][0], found[-1][1] + end - start)
                elif action.verb.is_memory:
                    before += end - start
        return tuple(found)

    def makespan_ns(self, plan: ExecutionPlan) -> int:
        """Return the time from the start of the first computation to the end of the last one."""
        return max((end for _, end in self.compute_ns(plan)), default=0)

    def bubble_share(self, plan: ExecutionPlan) -> float:
        """Return the idle share of the time of all ranks between the start of the first and the end of the last
        computation.
        """
        times = self.compute_ns(plan)
        busy, makespan = sum(end - start for start, end in times), max((end for _, end in times), default=0)
        return 1.0 - busy / max(makespan * plan.num_ranks, 1)

    def messages(self, plan: ExecutionPlan) -> list[MessageTime]:
        """Return the times of all messages between ranks, except empty ones, which are not sent."""
        sent: dict[tuple[int, int], tuple[int, int, int]] = {}
        posted: dict[int, int] = {}
        waited: dict[int, tuple[int, int, int]] = {}
        for rank, (actions, messages) in enumerate(zip(plan.ranks, messages_of(plan), strict=True)):
            times = self.times_ns[rank].tolist()
            for action, message, (start, end) in zip(actions, messages, times, strict=True):
                if message is None:
                    continue
                if action.verb.is_send and action.shape is not None and action.peer is not None:
                    size = math.prod(action.shape) * DTYPE_BYTES[action.dtype]
                    # Posting may already write a part of the message, so count from the start of the post.
                    sent[message, action.peer] = (rank, size, start)
                elif action.verb.is_receive:
                    posted[message] = start
                elif action.verb.is_wait and action.verb.post.is_receive:
                    waited[message] = (rank, start, end)
        found = []
        for (message, _), (sender, size, moment) in sent.items():
            if size and message in waited:
                rank, start, end = waited[message]
                found.append(MessageTime(sender, rank, size, max(moment, posted[message]), start, end))
        return found


def fit_links(
    messages: Sequence[MessageTime], hosts: Sequence[int]
) -> dict[tuple[int, int] | None, tuple[float, float]]:
    """Fit latency and bandwidth of links by the hosts of their ends. The key is None if ``hosts`` is empty.

    Only messages for which the receiver waited are used, since only their transfer times are known.
    """
    by_link: dict[tuple[int, int] | None, list[tuple[int, float]]] = defaultdict(list)
    for each in messages:
        if each.was_waited_for:
            pair = host_pair(hosts, each.sender, each.receiver) if hosts else None
            by_link[pair].append((each.num_bytes, each.under_way_ns / 1e9))
    lines = {pair: fit_link(found) for pair, found in by_link.items()}
    return {pair: line for pair, line in lines.items() if line is not None}
