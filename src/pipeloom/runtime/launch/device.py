"""Where a process computes, and where messages and copies run: at once on the CPU, in CUDA streams on a GPU.

The executor says when; the queues say how. On a GPU the host never waits before the end of the iteration: it puts work
into streams and events between them, and a wait for a message is a wait of the computing stream. Sends start when what
they send is computed, whatever is queued behind it; receives start at once, into memory of their own stream, whatever
is still being computed; WAIT_SEND_F holds the memory of a send until it has left, in a stream for each peer, so that a
late receiver holds up no other peer's messages here (NCCL itself may, where the ranks have one communicator).

With several NCCL ranks nobody has run this yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipeloom.errors import ExecutionError, InputError
from pipeloom.runtime.launch.transport import Handle, Post, Transport, TransportName, joins

DeviceType = Literal["cpu", "cuda"]

# Whatever the host sends (plans, times, checkpoints) goes by gloo; what GPUs send, by NCCL, or by the host too.
_BACKENDS: dict[DeviceType, dict[TransportName, str]] = {
    "cpu": {"direct": "gloo", "host": "gloo"},
    "cuda": {"direct": "cpu:gloo,cuda:nccl", "host": "cpu:gloo,cuda:gloo"},
}


def choose_device(
    wanted: Literal["cpu", "cuda", "auto"], num_local: int, transport: TransportName = "direct"
) -> DeviceType:
    """Type of the device of all ranks; ``"auto"``: a GPU each where there are enough on this host, else the CPU.

    Parameters
    ----------
    num_local : int
        Processes of this host, each of which computes.
    transport : {"direct", "host"}
        With ``"host"`` processes may share a GPU.

    Raises
    ------
    InputError
        When GPUs are wanted and there are too few: NCCL serves one process a GPU.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_wanted = num_local if transport == "direct" else 1
    if wanted == "cpu" or (wanted == "auto" and num_gpus < num_wanted):
        return "cpu"
    if num_gpus < num_wanted:
        raise InputError(
            "runtime.device",
            f"'cuda' for {num_local} ranks, and this host has {num_gpus} GPUs",
            "start as many ranks as there are GPUs, or use 'cpu' or 'auto', or runtime.transport = 'host'",
        )
    return "cuda"


_shares_gpu = False
"""Whether this process has joined others that may compute on its GPU."""


class Place(NamedTuple):
    """What a process computes on, and how messages leave it."""

    device: DeviceType = "cpu"
    transport: TransportName = "direct"


def place_of(device: DeviceType | Place) -> Place:
    """A place; of a device alone, one whose messages go from device to device."""
    return device if isinstance(device, Place) else Place(device)


def join_group(place: Place, store: Any, rank: int, num_ranks: int, timeout_s: float, local_rank: int) -> None:
    """Join the default process group, on a GPU of this process's own where it computes on one.

    With the transport ``"host"`` processes take the GPUs that there are in turn.

    NCCL's communicators are made when they are first used, not here: a group that is bound to a device serves all
    messages of a rank, whoever the peers are, in one stream.
    """
    global _shares_gpu
    _shares_gpu = place == Place("cuda", "host")
    if place.device == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count() if _shares_gpu else local_rank)
    backends = _BACKENDS[place.device][place.transport]
    dist.init_process_group(
        backends, store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s)
    )


def group_device() -> torch.device:
    """The device of this process, as `join_group` was told."""
    # Gloo is named for GPUs too, whether or not there is one.
    if _shares_gpu or "cuda:nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def moved(value: Any, device: torch.device | str) -> Any:
    """The same with its tensors on a device; dictionaries, lists and tuples are looked through, however deep."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# A GPU's iteration takes milliseconds; looking so often costs the host next to nothing.
_POLL_S = 1e-4


class StalledError(ExecutionError):
    """The device stands still.

    Attributes
    ----------
    num_reached : int
        Marks that it has come to.
    """

    def __init__(self, num_reached: int, timeout_s: float) -> None:
        self.num_reached = num_reached
        super().__init__(
            f"the device has been at it for {timeout_s:g} s and comes no further; where this is a wait for a message, "
            "look at the rank that sends it"
        )


class DeviceQueues:
    """Messages in the order of the actions, on the CPU."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport, self.device = transport, device

    def take_in(self, value: Any) -> Any:
        """Move what a user's function gave to the device: tensors, alone or in dictionaries, lists and tuples."""
        return moved(value, self.device)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post a send of what was computed last or before."""
        return self.transport.send(tensor, peer, tag)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int) -> tuple[Tensor, Handle]:
        """Post a receive into a new tensor."""
        tensor = self.empty(shape, dtype, peer)
        return tensor, self.transport.receive(tensor, peer, tag)

    def post(self, posts: list[Post]) -> list[Handle]:
        """Post several together."""
        assert joins(self.transport)
        return self.transport.post(posts)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> Tensor:
        """Room for what is to be received, in a joined operation or where nothing will come."""
        del peer
        return torch.empty(shape, dtype=dtype, device=self.device)

    def arrived(self, handle: Handle, tensor: Tensor | None) -> None:
        """Let what follows be computed with a received tensor."""
        del tensor
        handle.wait()

    def sent(self, handle: Handle, tensor: Tensor | None, peer: int) -> None:
        """Let go of a tensor once it has left."""
        del tensor, peer
        handle.wait()

    def copying(self) -> AbstractContextManager[object]:
        """Around copies to the host and back, which run beside the computation."""
        return nullcontext()

    def stamp(self) -> Any:
        """Mark of this moment."""
        return time.monotonic_ns()

    def times(self, stamps: Sequence[Any], timeout_s: float | None = None) -> Sequence[int]:
        """Nanoseconds of marks, on the host's monotonic clock."""
        del timeout_s
        return stamps


def await_marks(marks: Sequence[Any], timeout_s: float | None) -> None:
    """Wait until the device has come to all marks.

    Parameters
    ----------
    marks : sequence of torch.cuda.Event
        In the order in which they were recorded.
    timeout_s : float or None
        Longest time from one mark to the next; None: no bound.

    Raises
    ------
    StalledError
        When the device came to no further mark for so long.
    """
    reached, since = 0, time.monotonic()
    while not marks[-1].query():
        now = time.monotonic()
        while marks[reached].query():
            reached, since = reached + 1, now
            if reached == len(marks):
                return
        if timeout_s is not None and now - since > timeout_s:
            raise StalledError(reached, timeout_s)
        time.sleep(_POLL_S)


class CudaQueues(DeviceQueues):
    """Sends to each peer, receives, and copies in a stream each, beside the computing one: the current one."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        super().__init__(transport, device)
        self.compute = torch.cuda.current_stream(device)
        self.receiving, self.copies, self.inputs = self._stream(), self._stream(), self._stream()
        self.sending: dict[int, torch.cuda.Stream] = {}

    def _stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return stream

    def take_in(self, value: Any) -> Any:
        """Copy in a stream of its own, from pinned memory: the host is ahead, so this runs beside what is computed."""
        return tree_map_only(Tensor, self._take_in, value)

    def _take_in(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor.to(self.device)
        with torch.cuda.stream(self.inputs):
            here = tensor.pin_memory().to(self.device, non_blocking=True)
        self.compute.wait_stream(self.inputs)
        # Its memory is the other stream's: not to be given away there while it is read here.
        here.record_stream(self.compute)
        return here

    def towards(self, peer: int) -> torch.cuda.Stream:
        """The stream of what is sent to a peer."""
        if peer not in self.sending:
            self.sending[peer] = self._stream()
        return self.sending[peer]

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post a send of what was computed last or before."""
        stream = self.towards(peer)
        stream.wait_stream(self.compute)
        with torch.cuda.stream(stream):
            return self.transport.send(tensor, peer, tag)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int) -> tuple[Tensor, Handle]:
        """Post a receive into a new tensor of the receiving stream's memory."""
        with torch.cuda.stream(self.receiving):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            return tensor, self.transport.receive(tensor, peer, tag)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> Tensor:
        """Room in the memory of the peer's stream, where joined operations are posted."""
        with torch.cuda.stream(self.towards(peer)):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def post(self, posts: list[Post]) -> list[Handle]:
        """Post several with one peer together, in its stream."""
        stream = self.towards(posts[0].peer)
        stream.wait_stream(self.compute)
        with torch.cuda.stream(stream):
            return super().post(posts)

    def arrived(self, handle: Handle, tensor: Tensor | None) -> None:
        """Make the computing stream wait."""
        handle.wait()
        if tensor is not None:
            # Its memory is another stream's: not to be given away there while it is read here.
            tensor.record_stream(self.compute)

    def sent(self, handle: Handle, tensor: Tensor | None, peer: int) -> None:
        """Make the peer's stream wait, and with it whoever is given the memory next."""
        stream = self.towards(peer)
        with torch.cuda.stream(stream):
            handle.wait()
        if tensor is not None:
            tensor.record_stream(stream)

    def copying(self) -> AbstractContextManager[object]:
        """Around copies to the host and back."""
        self.copies.wait_stream(self.compute)
        return torch.cuda.stream(self.copies)

    def stamp(self) -> Any:
        """Mark of the moment when the computing stream comes to here."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.compute)
        return event

    def times(self, stamps: Sequence[Any], timeout_s: float | None = None) -> Sequence[int]:
        """Nanoseconds of marks; the host waits for the last of them, and takes it for now."""
        if not stamps:
            return []
        await_marks(stamps, timeout_s)
        now_ns = time.monotonic_ns()
        return [now_ns - round(stamp.elapsed_time(stamps[-1]) * 1e6) for stamp in stamps]


def queues_of(transport: Transport, device: torch.device) -> DeviceQueues:
    """The queues of a device."""
    make: Callable[[Transport, torch.device], DeviceQueues] = CudaQueues if device.type == "cuda" else DeviceQueues
    return make(transport, device)
