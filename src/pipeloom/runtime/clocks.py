"""Clocks of ranks on several hosts: by how much each differs from the first rank's, so that measured times compare.

All processes of one host share its monotonic clock. Between hosts the difference is estimated as NTP does: a rank asks
the first one for its time, and takes it to have been read in the middle between question and answer; of several such
exchanges the fastest says it best, since it cannot be wrong by more than half of its own duration.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipeloom.runtime.waiting import together

_ROUNDS = 8
# Clocks drift apart by some microseconds in a second.
_ITERATIONS_BETWEEN = 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Clock = Callable[[], int]
"""Nanoseconds since a moment of its own."""


class Exchange(NamedTuple):
    """A question after the time: when it left here, what the other clock said, and when the answer was here."""

    sent_ns: int
    there_ns: int
    received_ns: int

    @property
    def took_ns(self) -> int:
        """From question to answer."""
        return self.received_ns - self.sent_ns


class Offset(NamedTuple):
    """How much this clock is ahead of the other one, and the most by which that may be wrong."""

    ns: int
    error_ns: int


def estimate_offset(exchanges: Sequence[Exchange]) -> Offset:
    """Estimate from at least one exchange, whatever its two ways took."""
    best = min(exchanges, key=lambda each: each.took_ns)
    error_ns = -(-best.took_ns // 2)
    return Offset(best.sent_ns + best.took_ns // 2 - best.there_ns, error_ns)


def measure_offset(
    group: dist.ProcessGroup | None, asking: Sequence[int], clock: Clock = time.monotonic_ns
) -> Offset:
    """Ask the first rank of a group for its time, one rank after the other; all ranks of the group call it together.

    Parameters
    ----------
    group : ProcessGroup or None
        None: the default group.
    asking : sequence of int
        Ranks of the group that ask; the same on all.
    clock : callable
    """
    rank, cell = dist.get_rank(group), torch.zeros((), dtype=torch.int64)
    exchanges = []
    for asker in asking:
        for _ in range(_ROUNDS):
            if rank == asker:
                sent_ns = clock()
                dist.send(cell, group=group, group_dst=0)
                dist.recv(cell, group=group, group_src=0)
                exchanges.append(Exchange(sent_ns, int(cell), clock()))
            elif rank == 0:
                dist.recv(cell, group=group, group_src=asker)
                cell.fill_(clock())
                dist.send(cell, group=group, group_dst=asker)
    return estimate_offset(exchanges) if exchanges else Offset(0, 0)


class SharedClock:
    """Says by how much this rank's clock is ahead of the first rank's; all ranks of a group use it alike.

    On one host it is nothing, and costs nothing.

    Parameters
    ----------
    group : ProcessGroup or None
        A pipeline; None: the default group.
    host : bytes or None
        What names this host; None: its name and when it was started.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, host: bytes | None = None, clock: Clock = time.monotonic_ns
    ) -> None:
        self._group, self._clock = group, clock
        name = hashlib.blake2b(_this_host() if host is None else host, digest_size=8).digest()
        mine = torch.frombuffer(bytearray(name), dtype=torch.uint8)
        hosts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        with together("the start of training"):
            dist.all_gather(hosts, mine, group=group)
        self.asking = tuple(rank for rank, each in enumerate(hosts) if not torch.equal(each, hosts[0]))
        """Ranks of the group on other hosts than the first one's."""
        self._offset = Offset(0, 0)
        self._num_asked = 0

    def offset_ns(self) -> int:
        """The offset now; called by all ranks once an iteration, and measured anew every so often."""
        if self.asking and self._num_asked % _ITERATIONS_BETWEEN == 0:
            with together("comparing the clocks of the hosts"):
                self._offset = measure_offset(self._group, self.asking, self._clock)
        self._num_asked += 1
        return self._offset.ns


def _this_host() -> bytes:
    # Containers have names of their own, but the clock is the kernel's.
    return _BOOT_ID.read_bytes() if _BOOT_ID.exists() else socket.gethostname().encode()
