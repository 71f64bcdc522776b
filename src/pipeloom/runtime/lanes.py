"""Where messages and copies of one iteration run: at once on the CPU, in streams of their own on a GPU.

The executor says when; a lane says how. On a GPU the host never waits: it puts work into streams and events between
them, and a wait for a message is a wait of the computing stream. Sends start when what they send is computed,
whatever is queued behind it; receives start at once, into memory of their own stream, whatever is still being
computed; DF holds the memory of a send until it has left, in the sending stream.

With several NCCL ranks nobody has run this yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pipeloom.runtime.transport import BatchedTransport, Handle, Post, Transport


class Lane:
    """Messages in the order of the actions, on the CPU.

    Parameters
    ----------
    transport : Transport
    device : torch.device
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport, self.device = transport, device

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post a send of what was computed last or before."""
        return self.transport.send(tensor, peer, tag)

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int
    ) -> tuple[Tensor, Handle]:
        """Post a receive into a new tensor."""
        tensor = self.empty(shape, dtype)
        return tensor, self.transport.receive(tensor, peer, tag)

    def post(self, posts: list[Post]) -> list[Handle]:
        """Post several together."""
        assert isinstance(self.transport, BatchedTransport)
        return self.transport.post(posts)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room for what is to be received."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def arrived(self, handle: Handle, tensor: Tensor | None) -> None:
        """Let what follows be computed with a received tensor."""
        del tensor
        handle.wait()

    def sent(self, handle: Handle, tensor: Tensor | None) -> None:
        """Let go of a tensor once it has left."""
        del tensor
        handle.wait()

    def copying(self) -> AbstractContextManager[object]:
        """Around copies to the host and back, which run beside the computation."""
        return nullcontext()

    def stamp(self) -> Any:
        """Mark of this moment."""
        return time.monotonic_ns()

    def times(self, stamps: Sequence[Any]) -> Sequence[int]:
        """Nanoseconds of marks, on the host's monotonic clock."""
        return stamps


class CudaLane(Lane):
    """Sends, receives and copies in a stream each, beside the computing one: the one current when it is made."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        super().__init__(transport, device)
        self.compute = torch.cuda.current_stream(device)
        streams = [torch.cuda.Stream(device) for _ in range(3)]  # type: ignore[no-untyped-call]
        self.sending, self.receiving, self.copies = streams

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post a send of what was computed last or before."""
        self.sending.wait_stream(self.compute)
        with torch.cuda.stream(self.sending):
            return self.transport.send(tensor, peer, tag)

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int
    ) -> tuple[Tensor, Handle]:
        """Post a receive into a new tensor of the receiving stream's memory."""
        with torch.cuda.stream(self.receiving):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            return tensor, self.transport.receive(tensor, peer, tag)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room in the sending stream's memory, for a joined operation."""
        with torch.cuda.stream(self.sending):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def post(self, posts: list[Post]) -> list[Handle]:
        """Post several together, in the sending stream."""
        self.sending.wait_stream(self.compute)
        with torch.cuda.stream(self.sending):
            return super().post(posts)

    def arrived(self, handle: Handle, tensor: Tensor | None) -> None:
        """Make the computing stream wait."""
        handle.wait()
        if tensor is not None:
            # Its memory is another stream's: not to be given away there while it is read here.
            tensor.record_stream(self.compute)

    def sent(self, handle: Handle, tensor: Tensor | None) -> None:
        """Make the sending stream wait, and with it whoever is given the memory next."""
        with torch.cuda.stream(self.sending):
            handle.wait()
        if tensor is not None:
            tensor.record_stream(self.sending)

    def copying(self) -> AbstractContextManager[object]:
        """Around copies to the host and back."""
        self.copies.wait_stream(self.compute)
        return torch.cuda.stream(self.copies)

    def stamp(self) -> Any:
        """Mark of the moment when the computing stream comes to here."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.compute)
        return event

    def times(self, stamps: Sequence[Any]) -> Sequence[int]:
        """Nanoseconds of marks; the host waits for the last of them, and takes it for now."""
        if not stamps:
            return []
        stamps[-1].synchronize()
        now_ns = time.monotonic_ns()
        return [now_ns - round(stamp.elapsed_time(stamps[-1]) * 1e6) for stamp in stamps]


def lane_for(transport: Transport, device: torch.device) -> Lane:
    """The lane of a device."""
    make: Callable[[Transport, torch.device], Lane] = CudaLane if device.type == "cuda" else Lane
    return make(transport, device)
