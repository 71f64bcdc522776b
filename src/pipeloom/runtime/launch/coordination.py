"""What ranks do together beside a plan: hand it out, compare batches, wait for one another, share a clock."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from pipeloom.errors import ExecutionError, InputError
from pipeloom.packing import Packing, packing_from_counts
from pipeloom.plan import Delivery, RankAnswer, RankPlan
from pipeloom.spec import Batch, Layout, ModelSpec

AT_ONCE = 256 * 1024
"""Bytes that travel with their length."""
_LENGTH_BYTES = 8
MOST_BYTES = 1 << 30
"""Of a message: room is made for no more, whatever its length says."""


def broadcast_bytes(
    data: bytes | None,
    group: dist.ProcessGroup | None = None,
    at_once: int = AT_ONCE,
    *,
    source: int = 0,
    device: torch.device | str = "cpu",
) -> bytes:
    """Send bytes from one rank of a group, the only one to give ``data``, to all of it.

    Parameters
    ----------
    at_once : int
        Bytes that travel with their length; the same on all ranks.
    source : int
        Rank in the group that gives them.
    device : torch.device or str
        What the group serves.

    Raises
    ------
    ExecutionError
        On all ranks, where the length is above `MOST_BYTES`.
    """
    # A length sent ahead would put every rank to sleep and wake it twice, which costs more than the empty bytes.
    first = np.zeros(_LENGTH_BYTES + at_once, np.uint8)
    if data is not None:
        first[:_LENGTH_BYTES] = np.frombuffer(len(data).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
        first[_LENGTH_BYTES:][: len(data)] = np.frombuffer(data[:at_once], np.uint8)
    first = _broadcast(first, group, source, device)
    size = int.from_bytes(first[:_LENGTH_BYTES].tobytes(), "little")
    head = first[_LENGTH_BYTES:][:size].tobytes()
    if size <= at_once:
        return head
    _check_size(size)
    rest = np.zeros(size - at_once, np.uint8)
    if data is not None:
        rest[:] = np.frombuffer(data, np.uint8, offset=at_once)
    return head + _broadcast(rest, group, source, device).tobytes()


def _broadcast(
    numbers: np.ndarray, group: dist.ProcessGroup | None, source: int, device: torch.device | str
) -> np.ndarray:
    tensor = torch.from_numpy(numbers).to(device)
    dist.broadcast(tensor, group=group, group_src=source)
    found: np.ndarray = tensor.cpu().numpy()
    return found


def first_says(number: int, group: dist.ProcessGroup | None = None) -> int:
    """A number of the first rank's, on all ranks of a group; all call it together."""
    told = torch.tensor(number)
    dist.broadcast(told, group=group, group_src=0)
    return int(told)


def scatter_bytes(
    data: Sequence[bytes] | None, group: dist.ProcessGroup | None = None, at_once: int = AT_ONCE
) -> bytes:
    """Send from the first rank of a group, the only one to give ``data``, to every rank what is its own.

    Parameters
    ----------
    data : sequence of bytes or None
        By rank of the group.
    at_once : int
        Bytes for each rank that travel with their lengths; the same on all ranks.

    Raises
    ------
    ExecutionError
        On all ranks, where one is to get more than `MOST_BYTES`.
    """
    lengths = [] if data is None else [len(each) for each in data]
    heads = None
    if data is not None:
        # As in `broadcast_bytes`; each rank is also told the most of all, for what follows is of one size.
        heads = np.zeros((len(data), 2 * _LENGTH_BYTES + at_once), np.uint8)
        for row, each in zip(heads, data, strict=True):
            row[: 2 * _LENGTH_BYTES] = np.array([len(each), max(lengths)], "<i8").view(np.uint8)
            row[2 * _LENGTH_BYTES :][: len(each)] = np.frombuffer(each[:at_once], np.uint8)
    first = _scatter(2 * _LENGTH_BYTES + at_once, heads, group)
    size, most = first[: 2 * _LENGTH_BYTES].view("<i8").tolist()
    head = first[2 * _LENGTH_BYTES :][:size].tobytes()
    if most <= at_once:
        return head
    _check_size(most)
    tails = None
    if data is not None:
        tails = np.zeros((len(data), most - at_once), np.uint8)
        for row, each in zip(tails, data, strict=True):
            row[: max(0, len(each) - at_once)] = np.frombuffer(each[at_once:], np.uint8)
    return head + _scatter(most - at_once, tails, group)[: max(0, size - at_once)].tobytes()


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise ExecutionError(f"a message of {size} bytes is larger than {MOST_BYTES}, the most that is sent at once")


def _scatter(size: int, rows: np.ndarray | None, group: dist.ProcessGroup | None) -> np.ndarray:
    mine = torch.empty(size, dtype=torch.uint8)
    given = None if rows is None else list(torch.from_numpy(rows).unbind())
    dist.scatter(mine, given, group=group, group_src=0)
    return mine.numpy()


PLAN_AT_ONCE = 64 * 1024
"""Bytes of a rank's plan that travel with their length: about 1200 actions."""


class HandedOut(NamedTuple):
    """What a rank runs in an iteration."""

    plan: RankPlan
    packing: Packing


def hand_out(
    delivery: Delivery | None,
    batch: Batch,
    model: ModelSpec,
    layout: Layout,
    *,
    group: dist.ProcessGroup | None = None,
    stages: Sequence[int] = (),
) -> HandedOut:
    """Give every process of a replica its own part of the plan; all of them call it together.

    Each receives, decodes and later links its own actions alone. Nothing is checked again: the first rank has verified
    all of the plan.

    Parameters
    ----------
    delivery : Delivery or None
        On the first rank of the group, the only one to give it.
    batch : Batch
        The replica's, which all have read.
    group : torch.distributed.ProcessGroup or None
        All processes of the replica; None: the default group.
    stages : sequence of int
        Pipeline rank of each of them; empty: each its own.
    """
    parts = None
    if delivery is not None:
        by_rank = delivery.by_rank
        # The first rank has its own.
        parts = [b"", *(by_rank[stage] for stage in (stages or range(len(by_rank)))[1:])]
    data = scatter_bytes(parts, group, PLAN_AT_ONCE)
    if delivery is not None:
        return HandedOut(delivery.first, delivery.packing)
    mine = msgspec.msgpack.decode(data, type=RankAnswer)
    counts = mine.packing
    return HandedOut(mine.plan, packing_from_counts(batch, model, layout, counts.samples, counts.counts))


_MARK_BYTES = 12


class SameBatch:
    """Compares the digests of a batch over all ranks of all replicas.

    Every rank makes one for every batch, and one after the last. What it sends travels while the iteration before is
    run, so that `check` finds it there.

    Parameters
    ----------
    digest : str or None
        Of the global batch as this rank's loader gave it, see `batch_digest`; None: the loader has no more.
    """

    def __init__(self, digest: str | None) -> None:
        mark = bytes(_MARK_BYTES) if digest is None else bytes.fromhex(digest)
        self._mine = torch.frombuffer(bytearray(mark), dtype=torch.uint8)
        self._all = [torch.empty_like(self._mine) for _ in range(dist.get_world_size())]
        with together("comparing the batches of all ranks"):
            self._work = dist.all_gather(self._all, self._mine, async_op=True)

    def check(self, iteration: int | str) -> None:
        """Return where all ranks have the same batch, or none has one.

        Parameters
        ----------
        iteration : int or str
            For which it is, or what it is.

        Raises
        ------
        InputError
            On all ranks alike, naming those that have another batch than rank 0: they would take inputs from one
            batch and targets from another.
        """
        named = iteration if isinstance(iteration, str) else f"iteration {iteration}"
        if self._work is not None:
            with together(f"{named}: comparing the batches of all ranks"):
                self._work.wait()
        marks = [each.numpy().tobytes() for each in self._all]
        others = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
        if not others:
            return
        ended = [rank for rank, mark in enumerate(marks) if not any(mark)]
        if ended:
            raise InputError(
                named,
                f"{_ranks(ended)} no more batches, but other ranks have",
                "give all ranks the same batches: none of them takes a part of the data for itself",
            )
        raise InputError(
            named,
            f"{_ranks(others)} other samples than rank 0, or in another order",
            "give all ranks the same batches: seed what shuffles them alike, divide no data by rank, and let "
            "`describe` return ids that name a sample in every process",
        )


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} have"


_LOG = logging.getLogger(__name__)
_START_TIMEOUT = timedelta(hours=1)
_TELL_AFTER_S = 30.0


@contextmanager
def together(what: str) -> Iterator[None]:
    """Something that all ranks do: where it fails, another rank is gone or late.

    Raises
    ------
    ExecutionError
        Instead of what gloo and NCCL raise.
    """
    try:
        yield
    except RuntimeError as error:
        raise ExecutionError(f"{what} failed, another rank is gone or hangs: {error}") from error


def long_group(ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Make a group whose ranks wait for one another for an hour: files take as long as they take; all call it."""
    with together("making a group of ranks"):
        group: dist.ProcessGroup = dist.new_group(
            None if ranks is None else list(ranks), backend="gloo", timeout=_START_TIMEOUT
        )
    return group


class Patience:
    """Waits for the slowest rank for an hour. All ranks make one, and wait once."""

    def __init__(self) -> None:
        self._group = long_group()

    def wait(self, what: str) -> None:
        """Return when all ranks are here."""
        self.hear(what, 0)

    def hear(self, what: str, number: int) -> int:
        """The number of rank 0, when all ranks are here."""
        with together(what):
            dist.barrier(group=self._group)
            said = first_says(number, self._group)
            dist.destroy_process_group(self._group)
        return said


class FirstPlan:
    """Lets rank 0 take as long as it needs until it has the first plan: it may have to compile kernels.

    In training a rank that is waited for longer than the process group's timeout is taken for dead. On a slow machine
    compiling alone can take longer, so the first plan is waited for in a group of its own, for an hour. All ranks make
    one of these, and call `wait` once.
    """

    def __init__(self) -> None:
        self._group = long_group()
        self._told = threading.Timer(_TELL_AFTER_S, self._tell)
        self._told.daemon = True
        if dist.get_rank() == 0:
            self._told.start()

    def wait(self) -> None:
        """On rank 0: it has the first plan. On the others: wait until it has."""
        self.cancel()
        with together("the start of training"):
            dist.barrier(group=self._group)
            dist.destroy_process_group(self._group)

    def cancel(self) -> None:
        """Say nothing any more: the plan is there, or will never be."""
        self._told.cancel()

    def _tell(self) -> None:
        _LOG.warning(
            "no first plan after %.0f s: rank 0 compiles the planner's kernels (they are kept for later runs), and the "
            "other ranks wait",
            _TELL_AFTER_S,
        )


_ROUNDS = 8
# Clocks drift apart by some microseconds in a second.
_ITERATIONS_BETWEEN = 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = "/proc/self/ns/time"

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


def measure_offset(group: dist.ProcessGroup | None, asking: Sequence[int], clock: Clock = time.monotonic_ns) -> Offset:
    """Ask the first rank of a group for its time, one rank after the other; all ranks of the group call it together.

    Parameters
    ----------
    group : ProcessGroup or None
        None: the default group.
    asking : sequence of int
        Ranks of the group that ask; the same on all.
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
        with together("the start of training"):
            hosts = gather_hosts(group, host)
        self.asking = tuple(rank for rank, each in enumerate(hosts) if each != hosts[0])
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


def gather_hosts(group: dist.ProcessGroup | None = None, host: bytes | None = None) -> list[bytes]:
    """What names the host of every rank of a group; all of them call it together.

    Parameters
    ----------
    host : bytes or None
        This rank's; None: its kernel, and the clock that its processes see.
    """
    name = hashlib.blake2b(_this_host() if host is None else host, digest_size=8).digest()
    mine = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    names = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(names, mine, group=group)
    return [each.numpy().tobytes() for each in names]


def _this_host() -> bytes:
    """What names this host: its kernel, and the clock that its processes see."""
    # Containers have names of their own, but the clock is the kernel's, or that of a time namespace.
    if not _BOOT_ID.exists():
        return socket.gethostname().encode()
    clock = os.readlink(_TIME_NAMESPACE) if os.path.lexists(_TIME_NAMESPACE) else ""
    return _BOOT_ID.read_bytes() + clock.encode()
