"""Happens-before between streams, the host, and memory, by vector clocks.

Every stream counts its operations. A clock says up to which operation of each stream something has surely happened. An
operation is enqueued after all that the host knows; it knows what it has synchronized with. Two operations that use one
block of memory, at least one of which writes, must be ordered; so must the last use of memory and its reuse.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


class RaceError(RuntimeError):
    """Two uses of memory are not ordered."""


def in_engine() -> bool:
    """Return whether this is a thread of autograd's engine, which Python did not start."""
    return isinstance(threading.current_thread(), threading._DummyThread)


@dataclass
class Clock:
    """Number of operations of each stream that have surely happened."""

    counts: dict[int, int] = field(default_factory=dict)

    def join(self, other: Clock) -> None:
        """Also know all that another clock knows."""
        for stream, count in other.counts.items():
            self.counts[stream] = max(self.counts.get(stream, 0), count)

    def knows(self, use: Use) -> bool:
        """Return whether a use has surely happened."""
        return self.counts.get(use.stream, 0) >= use.count

    def copy(self) -> Clock:
        """Return a copy."""
        return Clock(dict(self.counts))


@dataclass(frozen=True)
class Use:
    """One operation on memory."""

    stream: int
    count: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} in stream {self.stream}"


@dataclass
class Block:
    """Memory, and its uses that later ones must wait for.

    Attributes
    ----------
    owner : Stream or None
        Stream whose later allocations may reuse it; None for pinned host memory.
    recorded : set of Stream
        Streams that `record_stream` named.
    """

    num_bytes: int
    owner: Stream | None
    written: Use | None = None
    read: dict[int, Use] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)

    def check(self, clock: Clock, what: str, *, writes: bool) -> None:
        """Raise `RaceError` if a use with this clock is not ordered after the uses before it."""
        before = [self.written] if self.written else []
        if writes:
            before += self.read.values()
        for use in before:
            if not clock.knows(use):
                verb = "writes" if writes else "reads"
                raise RaceError(f"{what} {verb} memory that {use} may still use; wait for that stream first")

    def add(self, use: Use, *, writes: bool) -> None:
        """Note a use."""
        if writes:
            self.written, self.read = use, {}
        else:
            self.read[use.stream] = use


class Stream:
    """A queue of operations of a device."""

    _number = 0
    _lock = threading.Lock()

    def __init__(self, world: World, device_index: int) -> None:
        with Stream._lock:
            Stream._number += 1
            self.id = Stream._number
        self.world, self.device_index, self.clock = world, device_index, Clock()

    def enqueue(self, what: str, reads: list[Block], writes: list[Block]) -> None:
        """Run an operation, and check that it is ordered after all uses of its memory."""
        with self.world.lock:
            self.clock.join(self.world.host(self.device_index))
            self.clock.counts[self.id] = self.clock.counts.get(self.id, 0) + 1
            use = Use(self.id, self.clock.counts[self.id], what)
            try:
                for block in writes:
                    block.check(self.clock, f"{use}", writes=True)
                for block in reads:
                    block.check(self.clock, f"{use}", writes=False)
            except RaceError as error:
                self.world.found(str(error))
            for block in reads:
                block.add(use, writes=False)
            for block in writes:
                block.add(use, writes=True)

    def wait(self, clock: Clock) -> None:
        """Make later operations wait for all that a clock knows."""
        with self.world.lock:
            self.clock.join(clock)


class World:
    """Clocks of the hosts, one for each device, and counts of memory.

    Each device stands for a rank, whose host knows nothing of what the others have synchronized with.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.hosts: dict[int, Clock] = {}
        self.problems: list[str] = []
        self.live: dict[int, int] = {}
        self.peak: dict[int, int] = {}
        self.recorded_bytes = 0
        """Bytes that were freed while a recorded stream held them."""
        self.num_waits = 0
        """How often a host has waited for a device."""

    def host(self, device_index: int) -> Clock:
        """Return the clock of a device's host."""
        return self.hosts.setdefault(device_index, Clock())

    def synchronize(self, device_index: int, clock: Clock) -> None:
        """Make a host wait for all that a clock knows."""
        with self.lock:
            self.num_waits += 1
            self.host(device_index).join(clock)

    def host_use(self, device_index: int, block: Block, what: str, *, writes: bool) -> None:
        """Check a use by a host itself."""
        with self.lock:
            block.check(self.host(device_index), f"the host's {what}", writes=writes)

    def allocate(self, block: Block) -> None:
        """Count a new block."""
        if block.owner is not None:
            with self.lock:
                here = block.owner.device_index
                self.live[here] = self.live.get(here, 0) + block.num_bytes
                self.peak[here] = max(self.peak.get(here, 0), self.live[here])

    def free(self, block: Block) -> None:
        """Count a freed block, and note a problem if its reuse is not ordered after its last use.

        As PyTorch's allocator does, the reuse waits for all that the owner and recorded streams have been given.
        """
        if block.owner is None:
            # PyTorch does not reuse pinned memory before the copies that it enqueued are done.
            return
        with self.lock:
            self.live[block.owner.device_index] -= block.num_bytes
            self.recorded_bytes += block.num_bytes if block.recorded - {block.owner} else 0
            known = self.host(block.owner.device_index).copy()
            for stream in (block.owner, *block.recorded):
                known.join(stream.clock)
            for use in [*block.read.values(), *([block.written] if block.written else [])]:
                if not known.knows(use):
                    self.problems.append(
                        f"memory of stream {block.owner.id} is freed while {use} may still use it; call record_stream"
                    )

    def found(self, problem: str, kind: type[Exception] = RaceError) -> None:
        """Raise a problem, or note it in autograd's own threads, where an error would end the process."""
        if not in_engine():
            raise kind(problem)
        self.problems.append(problem)

    def raise_problems(self) -> None:
        """Raise the first problem that was noted."""
        with self.lock:
            if self.problems and not in_engine():
                found, self.problems = self.problems, []
                raise RaceError(found[0])
