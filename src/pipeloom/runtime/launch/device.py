"""Devices, and the queues of messages and copies: immediate on the CPU, streams of an accelerator.

The executor decides the order, the queues decide how operations run. On a GPU the host waits only at the end of the
iteration. It enqueues work into streams with events between them, and a wait for a message is a wait of the compute
stream. A send starts once its tensor is computed, regardless of work queued later. A receive starts at once into memory
of its own stream, regardless of running computation. WAIT_SEND_F holds the memory of a send until it has left. Each
peer has its own stream for this, so that a late receiver does not delay messages to other peers here. NCCL itself may
delay them if the ranks have one communicator. Copies to the host and back have a stream for each direction, because a
link to the host carries both at once.

Not yet tested with several NCCL ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipeloom.errors import ExecutionError, InputError
from pipeloom.runtime.launch import accelerator
from pipeloom.runtime.launch.transport import Handle, Post, Transport, TransportName, batches_p2p

DeviceType = Literal["cpu", "cuda"]

# Messages of the host (plans, times, checkpoints) use gloo. Messages of GPUs use NCCL, or gloo with the transport
# ``"host"``.
_BACKENDS: dict[DeviceType, dict[TransportName, str]] = {
    "cpu": {"direct": "gloo", "host": "gloo"},
    "cuda": {"direct": "cpu:gloo,cuda:nccl", "host": "cpu:gloo,cuda:gloo"},
}


def choose_device(
    wanted: Literal["cpu", "cuda", "auto"], num_local: int, transport: TransportName = "direct"
) -> DeviceType:
    """Return the device type of all ranks. ``"auto"`` uses GPUs if this host has enough of them, else the CPU.

    Parameters
    ----------
    num_local : int
        Number of processes on this host that compute.
    transport : {"direct", "host"}
        With ``"host"``, processes may share a GPU.

    Raises
    ------
    InputError
        GPUs are requested, but there are too few. NCCL supports one process per GPU.
    """
    num_gpus = accelerator.count()
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


_shared = ""
"""Type of the device of this process, if it has joined a group whose processes may share devices."""


class Place(NamedTuple):
    """The device of a process and the transport of its messages."""

    device: DeviceType = "cpu"
    transport: TransportName = "direct"

    @property
    def of_messages(self) -> DeviceType:
        """The device of the tensors that are sent."""
        return self.device if self.transport == "direct" else "cpu"


def place_of(device: DeviceType | Place) -> Place:
    """Return a place. A device alone gets the direct transport."""
    return device if isinstance(device, Place) else Place(device)


def join_group(place: Place, store: Any, rank: int, num_ranks: int, timeout_s: float, local_rank: int) -> None:
    """Join the default process group, and select this process's GPU if it computes on one.

    With the transport ``"host"``, processes are assigned to the GPUs in turn.

    NCCL's communicators are made on first use, not here. A group that is bound to a device would serve all messages of
    a rank in one stream, for all peers.
    """
    global _shared
    _shared = place.device if place.device != "cpu" and place.transport == "host" else ""
    if place.device != "cpu":
        index = local_rank % accelerator.count(place.device) if _shared else local_rank
        accelerator.select(torch.device(place.device, index))
    backends = _BACKENDS[place.device][place.transport]
    dist.init_process_group(
        backends, store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s)
    )


def group_device() -> torch.device:
    """Return the device of this process, as passed to `join_group`."""
    # Gloo is configured for GPUs even if there is none.
    config = dist.get_backend_config()
    joined = (kind for kind, each in _BACKENDS.items() if kind != "cpu" and each["direct"].split(",")[-1] in config)
    return accelerator.with_index(torch.device(_shared or next(joined, "cpu")))


def moved(value: Any, device: torch.device | str) -> Any:
    """Return a value with its tensors moved to a device, also those nested in dictionaries, lists and tuples.

    The host does not wait for copies from it to an accelerator.
    """
    to = torch.device(device)
    return _map_tensors(lambda tensor: _moved(tensor, to), value)


def _map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to the tensors of a nested value, as `tree_map_only`, which is slow for a single tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if value is None:
        return None
    kind = type(value)
    if kind is dict:
        return {key: _map_tensors(function, each) for key, each in value.items()}
    if kind is tuple or kind is list:
        return kind([_map_tensors(function, each) for each in value])
    return tree_map_only(Tensor, function, value)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device.type == "cpu" and accelerator.on_accelerator(device):
        return accelerator.pinned(tensor).to(device, non_blocking=True)
    return tensor.to(device)


# An iteration on a GPU takes milliseconds. Polling this often costs the host almost nothing.
_POLL_S = 1e-4


class StalledError(ExecutionError):
    """The device makes no progress. It has passed ``num_reached`` marks."""

    def __init__(self, num_reached: int, timeout_s: float) -> None:
        self.num_reached = num_reached
        super().__init__(
            f"the device has made no progress for {timeout_s:g} s; if this is a wait for a message, "
            "look at the rank that sends it"
        )


class DeviceQueues:
    """Queues of the CPU, where messages run in the order of the actions.

    ``to_host`` and ``from_host`` are streams of copies. None: copies run in the order of the actions.
    """

    to_host: Any = None
    from_host: Any = None

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport, self.device = transport, device

    def take_in(self, value: Any) -> Any:
        """Move the result of a user's function to the device, see `moved`."""
        return moved(value, self.device)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post a send of a tensor that was computed before."""
        return self.transport.send(tensor, peer, tag)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int) -> tuple[Tensor, Handle]:
        """Post a receive into a new tensor."""
        tensor = self.empty(shape, dtype, peer)
        return tensor, self.transport.receive(tensor, peer, tag)

    def post(self, posts: list[Post]) -> list[Handle]:
        """Post several messages as one operation."""
        assert batches_p2p(self.transport)
        return self.transport.post(posts)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> Tensor:
        """Return an empty tensor for a message of a batched operation, or for a message without rows."""
        del peer
        return torch.empty(shape, dtype=dtype, device=self.device)

    def arrived(self, handle: Handle, tensor: Tensor | None) -> None:
        """Make later computation wait for a received tensor."""
        del tensor
        handle.wait()

    def sent(self, handle: Handle, tensor: Tensor | None, peer: int) -> None:
        """Release a tensor once it has been sent."""
        del tensor, peer
        handle.wait()

    def end_copies(self) -> None:
        """Make later computation wait for all copies to the host and back."""

    def stamp(self) -> Any:
        """Return a mark of this moment."""
        return time.monotonic_ns()

    def times(self, stamps: Sequence[Any], timeout_s: float | None = None) -> Sequence[int]:
        """Return the times of marks in nanoseconds on the host's monotonic clock."""
        del timeout_s
        return stamps


def await_marks(marks: Sequence[Any], timeout_s: float | None) -> None:
    """Wait until the device has passed all marks, which are events in the order in which they were recorded.

    Raises `StalledError` if it passes no further mark within ``timeout_s`` seconds. None waits forever.
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


class AcceleratorQueues(DeviceQueues):
    """Queues of an accelerator: streams for sends to each peer, receives, copies to the host and back, and inputs."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        super().__init__(transport, device)
        self.compute = accelerator.current_stream(device)
        self.receiving, self.inputs = (accelerator.new_stream(device) for _ in range(2))
        self.to_host, self.from_host = (accelerator.new_stream(device) for _ in range(2))
        self.sending: dict[int, Any] = {}

    def take_in(self, value: Any) -> Any:
        """Copy inputs from pinned memory in a separate stream, beside computation, because the host is ahead."""
        return _map_tensors(self._take_in, value)

    def _take_in(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor.to(self.device)
        with accelerator.enqueued_in(self.inputs):
            here = _moved(tensor, self.device)
        self.compute.wait_stream(self.inputs)
        # The memory belongs to the other stream, which must not reuse it while this stream reads it.
        here.record_stream(self.compute)
        return here

    def towards(self, peer: int) -> Any:
        """Return the stream of messages to a peer."""
        if peer not in self.sending:
            self.sending[peer] = accelerator.new_stream(self.device)
        return self.sending[peer]

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        stream = self.towards(peer)
        stream.wait_stream(self.compute)
        with accelerator.enqueued_in(stream):
            return self.transport.send(tensor, peer, tag)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int) -> tuple[Tensor, Handle]:
        """Post a receive into a new tensor in the receiving stream's memory."""
        with accelerator.enqueued_in(self.receiving):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            return tensor, self.transport.receive(tensor, peer, tag)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> Tensor:
        """Return an empty tensor in the memory of the peer's stream, in which batched operations are posted."""
        with accelerator.enqueued_in(self.towards(peer)):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def post(self, posts: list[Post]) -> list[Handle]:
        stream = self.towards(posts[0].peer)
        stream.wait_stream(self.compute)
        with accelerator.enqueued_in(stream):
            return super().post(posts)

    def arrived(self, handle: Handle, tensor: Tensor | None) -> None:
        """Make the compute stream wait for a received tensor."""
        handle.wait()
        if tensor is not None:
            # The memory belongs to another stream, which must not reuse it while this stream reads it.
            tensor.record_stream(self.compute)

    def sent(self, handle: Handle, tensor: Tensor | None, peer: int) -> None:
        """Make the peer's stream wait for a send, and with it the next user of the memory."""
        stream = self.towards(peer)
        with accelerator.enqueued_in(stream):
            handle.wait()
        if tensor is not None:
            tensor.record_stream(stream)

    def end_copies(self) -> None:
        self.compute.wait_stream(self.to_host)
        self.compute.wait_stream(self.from_host)

    def stamp(self) -> Any:
        """Return a mark of the moment at which the compute stream arrives here."""
        event = accelerator.new_event(self.device, timing=True)
        event.record(self.compute)
        return event

    def times(self, stamps: Sequence[Any], timeout_s: float | None = None) -> Sequence[int]:
        """Return the times of marks in nanoseconds. Waits for the last mark and takes its time for now."""
        if not stamps:
            return []
        await_marks(stamps, timeout_s)
        now_ns = time.monotonic_ns()
        return [now_ns - round(stamp.elapsed_time(stamps[-1]) * 1e6) for stamp in stamps]


def queues_of(transport: Transport, device: torch.device) -> DeviceQueues:
    """Return the queues of a device."""
    kind = AcceleratorQueues if accelerator.on_accelerator(device) else DeviceQueues
    return kind(transport, device)
