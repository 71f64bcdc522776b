"""Coordination of ranks beside a plan: broadcast it, compare batches, wait for one another, align clocks."""

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

from pipeloom.errors import ExecutionError, InputError, PipeloomError
from pipeloom.packing import Packing, packing_from_counts
from pipeloom.plan import Delivery, RankAnswer, RankPlan
from pipeloom.spec import Batch, Layout, ModelSpec

AT_ONCE = 256 * 1024
"""Bytes that are sent together with their length."""
_LENGTH_BYTES = 8
MOST_BYTES = 1 << 30
"""Largest message. No more memory is allocated, whatever its length field says."""


def broadcast_bytes(
    data: bytes | None,
    group: dist.ProcessGroup | None = None,
    at_once: int = AT_ONCE,
    *,
    source: int = 0,
    device: torch.device | str = "cpu",
) -> bytes:
    """Broadcast the ``data`` of the rank ``source`` of a group to all of its ranks. On the others it is None.

    The first ``at_once`` bytes, the same number on all ranks, are sent together with the length. ``device`` is that of
    the group's tensors. All ranks raise `ExecutionError` if there are more than `MOST_BYTES`.
    """
    # A separate length message would put every rank to sleep and wake it twice. This costs more than padding.
    first = np.zeros(_LENGTH_BYTES + at_once, np.uint8)
    if data is not None:
        first[:_LENGTH_BYTES] = np.frombuffer(len(data).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
        first[_LENGTH_BYTES:][: len(data)] = np.frombuffer(data[:at_once], np.uint8)
    first = _broadcast(first, group, source, device)
    size = int.from_bytes(first[:_LENGTH_BYTES].tobytes(), "little")
    beginning = first[_LENGTH_BYTES:][:size].tobytes()
    if size <= at_once:
        return beginning
    _check_size(size)
    rest = np.zeros(size - at_once, np.uint8)
    if data is not None:
        rest[:] = np.frombuffer(data, np.uint8, offset=at_once)
    return beginning + _broadcast(rest, group, source, device).tobytes()


def message_device(group: dist.ProcessGroup | None, device: torch.device | str) -> torch.device:
    """Return the device of a group's small messages: the CPU if the group supports it, else ``device``."""
    return torch.device("cpu") if "cpu:" in str(dist.get_backend_config(group)) else torch.device(device)


def _broadcast(
    numbers: np.ndarray, group: dist.ProcessGroup | None, source: int, device: torch.device | str
) -> np.ndarray:
    tensor = torch.from_numpy(numbers).to(device)
    dist.broadcast(tensor, group=group, group_src=source)
    received: np.ndarray = tensor.cpu().numpy()
    return received


def broadcast_int(number: int, group: dist.ProcessGroup | None = None) -> int:
    """Broadcast a number from the first rank of a group. All of its ranks call it together."""
    tensor = torch.tensor(number)
    dist.broadcast(tensor, group=group, group_src=0)
    return int(tensor)


def scatter_bytes(
    data: Sequence[bytes] | None, group: dist.ProcessGroup | None = None, at_once: int = AT_ONCE
) -> bytes:
    """Send each rank of a group its own bytes from the first rank, on which ``data`` has them; None on all others.

    The first ``at_once`` bytes, a number that must be the same on all ranks, are sent together with their length. All
    ranks raise `ExecutionError` if those of some rank exceed `MOST_BYTES`.
    """
    lengths = [] if data is None else [len(each) for each in data]
    first_rows = None
    if data is not None:
        # As in `broadcast_bytes`. Each rank also receives the largest length, which determines the size of the second
        # message.
        first_rows = np.zeros((len(data), 2 * _LENGTH_BYTES + at_once), np.uint8)
        for row, each in zip(first_rows, data, strict=True):
            row[: 2 * _LENGTH_BYTES] = np.array([len(each), max(lengths)], "<i8").view(np.uint8)
            row[2 * _LENGTH_BYTES :][: len(each)] = np.frombuffer(each[:at_once], np.uint8)
    first = _scatter(2 * _LENGTH_BYTES + at_once, first_rows, group)
    size, most = first[: 2 * _LENGTH_BYTES].view("<i8").tolist()
    beginning = first[2 * _LENGTH_BYTES :][:size].tobytes()
    if most <= at_once:
        return beginning
    _check_size(most)
    rest_rows = None
    if data is not None:
        rest_rows = np.zeros((len(data), most - at_once), np.uint8)
        for row, each in zip(rest_rows, data, strict=True):
            row[: max(0, len(each) - at_once)] = np.frombuffer(each[at_once:], np.uint8)
    return beginning + _scatter(most - at_once, rest_rows, group)[: max(0, size - at_once)].tobytes()


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise ExecutionError(f"a message of {size} bytes is larger than {MOST_BYTES}, the most that is sent at once")


def _scatter(size: int, rows: np.ndarray | None, group: dist.ProcessGroup | None) -> np.ndarray:
    own = torch.empty(size, dtype=torch.uint8)
    tensors = None if rows is None else list(torch.from_numpy(rows).unbind())
    dist.scatter(own, tensors, group=group, group_src=0)
    return own.numpy()


PLAN_FIRST_BYTES = 64 * 1024
"""Bytes of a rank's plan that are sent together with their length: about 1200 actions."""


class DeliveredPlan(NamedTuple):
    """What a rank runs in an iteration."""

    plan: RankPlan
    packing: Packing


def scatter_plan(
    delivery: Delivery | None,
    batch: Batch,
    model: ModelSpec,
    layout: Layout,
    *,
    group: dist.ProcessGroup | None = None,
    stages: Sequence[int] = (),
) -> DeliveredPlan:
    """Send every process of a replica its own part of the plan. All of them call it together.

    Each process receives, decodes and later links only its own actions. They are not verified again, because the first
    rank has verified the whole plan.

    ``delivery`` is the planner's on the first rank of the group, and None on all others. ``batch`` is the replica's
    batch, which all of its processes have read. ``group`` has all processes of the replica; None is the default group.
    ``stages`` has the pipeline rank of each of them. Empty: their ranks in the group.
    """
    parts = None
    if delivery is not None:
        by_rank = delivery.by_rank
        # The first rank keeps its own part.
        parts = [b"", *(by_rank[stage] for stage in (stages or range(len(by_rank)))[1:])]
    data = scatter_bytes(parts, group, PLAN_FIRST_BYTES)
    if delivery is not None:
        return DeliveredPlan(delivery.first, delivery.packing)
    answer = msgspec.msgpack.decode(data, type=RankAnswer)
    counts = answer.packing
    return DeliveredPlan(answer.plan, packing_from_counts(batch, model, layout, counts.samples, counts.counts))


_MARK_BYTES = 12


class BatchComparison:
    """Compares the digests of a batch over all ranks of all replicas.

    Every rank makes one for every batch, and one more after the last, with None. The digests (`batch_digest`) of the
    global batch travel while the previous iteration runs, so that `check` usually need not wait.
    """

    def __init__(self, digest: str | None) -> None:
        mark = bytes(_MARK_BYTES) if digest is None else bytes.fromhex(digest)
        self._mine = torch.frombuffer(bytearray(mark), dtype=torch.uint8)
        self._all = [torch.empty_like(self._mine) for _ in range(dist.get_world_size())]
        with together("comparing the batches of all ranks"):
            self._work = dist.all_gather(self._all, self._mine, async_op=True)

    def check(self, iteration: int | str) -> None:
        """Return if all ranks have the same batch, or none has one.

        ``iteration`` is its number, or a description of the batch. Raises `InputError` on all ranks if some have
        another batch than rank 0, so that inputs and targets would come from different batches. The error names these
        ranks.
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
                "give all ranks the same batches: do not shard the data by rank",
            )
        raise InputError(
            named,
            f"{_ranks(others)} other samples than rank 0, or in another order",
            "give all ranks the same batches: shuffle with the same seed, do not shard the data by rank, and let "
            "`describe` return ids that name a sample in every process",
        )


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} have"


_LOG = logging.getLogger(__name__)
_START_TIMEOUT = timedelta(hours=1)
_WARN_AFTER_S = 30.0


@contextmanager
def together(what: str) -> Iterator[None]:
    """Translate errors of an operation of all ranks. It fails if another rank has ended or hangs.

    Raises `ExecutionError` instead of the errors of gloo and NCCL.
    """
    try:
        yield
    except RuntimeError as error:
        raise ExecutionError(f"{what} failed, another rank is lost or hangs: {error}") from error


def raise_together(error: PipeloomError | None, what: str) -> None:
    """Raise the error of any rank on all ranks, or return if there is none. All ranks call it together.

    Otherwise ranks without an error wait for the failed one, and report that it is lost. ``error`` is that of this
    rank. ``what`` names what was done, for the error of a lost rank.
    """
    errors: list[PipeloomError | None] = [None] * dist.get_world_size()
    with together(what):
        dist.all_gather_object(errors, error)
    for rank, each in enumerate(errors):
        if each is not None:
            raise error if error is not None and rank == dist.get_rank() else each


def long_group(ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Make a process group with a timeout of an hour, for operations on files. All ranks call it together."""
    with together("making a group of ranks"):
        group: dist.ProcessGroup = dist.new_group(
            None if ranks is None else list(ranks), backend="gloo", timeout=_START_TIMEOUT
        )
    return group


class LongBarrier:
    """A barrier with a timeout of an hour. All ranks make one and use it once."""

    def __init__(self) -> None:
        self._group = long_group()

    def wait(self, what: str) -> None:
        """Return when all ranks have arrived."""
        self.hear(what, 0)

    def hear(self, what: str, number: int) -> int:
        """Return the number of rank 0 when all ranks have arrived."""
        with together(what):
            dist.barrier(group=self._group)
            answer = broadcast_int(number, self._group)
            dist.destroy_process_group(self._group)
        return answer


class FirstPlan:
    """Lets rank 0 take as long as it needs for the first plan, because it may have to compile kernels.

    In training, a rank that does not answer within the process group's timeout counts as lost. Compiling on a slow
    machine can take longer. The ranks therefore wait for the first plan in a separate group, for up to an hour. All
    ranks make one of these and call `wait` together.
    """

    def __init__(self) -> None:
        self._barrier: LongBarrier | None = LongBarrier()
        self._warning = threading.Timer(_WARN_AFTER_S, self._warn)
        self._warning.daemon = True
        if dist.get_rank() == 0:
            self._warning.start()

    def wait(self) -> None:
        """Return when rank 0 has the first plan; later calls return at once. Rank 0 calls it when it has the plan."""
        barrier, self._barrier = self._barrier, None
        if barrier is not None:
            self.cancel()
            barrier.wait("the start of training")

    def cancel(self) -> None:
        """Cancel the warning, because the plan has arrived or never will."""
        self._warning.cancel()

    def _warn(self) -> None:
        _LOG.warning(
            "no first plan after %.0f s: rank 0 compiles the planner's kernels (cached for later runs), and the "
            "other ranks wait",
            _WARN_AFTER_S,
        )


_ROUNDS = 8
# Clocks drift apart by some microseconds per second.
_ITERATIONS_BETWEEN = 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = "/proc/self/ns/time"

Clock = Callable[[], int]
"""Returns nanoseconds since an arbitrary moment."""


class Exchange(NamedTuple):
    """One request for another clock's time: when it was sent, the other clock's time, and when the reply arrived."""

    sent_ns: int
    there_ns: int
    received_ns: int

    @property
    def took_ns(self) -> int:
        """Nanoseconds from request to reply."""
        return self.received_ns - self.sent_ns


class Offset(NamedTuple):
    """Nanoseconds by which this clock is ahead of the other one, and the largest possible error."""

    ns: int
    error_ns: int


def estimate_offset(exchanges: Sequence[Exchange]) -> Offset:
    """Estimate the offset from at least one exchange. The two directions may take different times."""
    best = min(exchanges, key=lambda each: each.took_ns)
    error_ns = -(-best.took_ns // 2)
    return Offset(best.sent_ns + best.took_ns // 2 - best.there_ns, error_ns)


def measure_offset(group: dist.ProcessGroup | None, asking: Sequence[int], clock: Clock = time.monotonic_ns) -> Offset:
    """Measure clock offsets to the first rank of a group (None: the default group). All of its ranks call it together.

    The ranks ``asking``, the same on all ranks, measure their offset, one after the other.
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
    """Offset of this rank's clock to the clock of the first rank of a pipeline. All of its ranks use it alike.

    On a single host the offset is zero and costs nothing. Without ``host``, an identifier of this host, it is found as
    in `gather_hosts`.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, host: bytes | None = None, clock: Clock = time.monotonic_ns
    ) -> None:
        self._group, self._clock = group, clock
        with together("the start of training"):
            hosts = gather_hosts(group, host)
        self.asking = tuple(rank for rank, each in enumerate(hosts) if each != hosts[0])
        """Ranks of the group on other hosts than its first rank."""
        self._offset = Offset(0, 0)
        self._num_asked = 0

    def offset_ns(self) -> int:
        """Return the current offset. All ranks call it once per iteration. It is measured again at intervals."""
        if self.asking and self._num_asked % _ITERATIONS_BETWEEN == 0:
            with together("comparing the clocks of the hosts"):
                self._offset = measure_offset(self._group, self.asking, self._clock)
        self._num_asked += 1
        return self._offset.ns


def gather_hosts(group: dist.ProcessGroup | None = None, host: bytes | None = None) -> list[bytes]:
    """Return an identifier of the host of every rank of a group. All of its ranks call it together.

    Without ``host``, this rank's host is identified by its kernel and the clock of its processes.
    """
    name = hashlib.blake2b(_this_host() if host is None else host, digest_size=8).digest()
    own = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    names = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(names, own, group=group)
    return [each.numpy().tobytes() for each in names]


def _this_host() -> bytes:
    """Return an identifier of this host: its kernel and the clock of its processes."""
    # Containers have their own names, but share the clock of the kernel or of a time namespace.
    if not _BOOT_ID.exists():
        return socket.gethostname().encode()
    clock = os.readlink(_TIME_NAMESPACE) if os.path.lexists(_TIME_NAMESPACE) else ""
    return _BOOT_ID.read_bytes() + clock.encode()
