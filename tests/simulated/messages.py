"""Messages between simulated devices by NCCL's rules, over ranks that are threads.

Each pair of ranks has a communicator with a stream of its own, or a rank has one for all its messages. A message waits
for the stream in which it is posted, and `wait` makes the current stream wait for the message; the host never waits.
Until then, the message keeps its tensor. The contents travel by a `ThreadHub`, which knows how NCCL matches messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.runtime.launch.transport import Handle, Post, ThreadHub

from . import device as sim
from .clocks import Clock


class _Message:
    def __init__(self, inner: Handle, clock: Clock, tensor: Tensor, arrived: Tensor | None) -> None:
        self._inner, self._clock, self._tensor, self._arrived = inner, clock, tensor, arrived

    def wait(self) -> None:
        """Make the current stream wait for the message."""
        self._inner.wait()
        if self._arrived is not None:
            with torch.no_grad():
                sim.contents(self._tensor).copy_(self._arrived)
        sim.current().wait(self._clock)
        self._tensor = torch.empty(0)


class SimTransport:
    """The messages of one rank."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self._inner: Any = hub.transport(rank)
        self._serial = hub.order == "serial"
        self.batches_p2p = hub.batches_p2p
        self._streams: dict[int, sim.PublicStream] = {}

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post a send."""
        return self.post([Post(True, tensor, peer, tag)])[0]

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post a receive."""
        return self.post([Post(False, tensor, peer, tag)])[0]

    def post(self, posts: Sequence[Post]) -> list[Handle]:
        """Post messages with one peer together."""
        (peer,) = {post.peer for post in posts}
        communicator = -1 if self._serial else peer
        if communicator not in self._streams:
            self._streams[communicator] = sim.PublicStream()
        stream = self._streams[communicator]
        stream.wait(sim.current().clock)
        for post in posts:
            word = f"{'a send to' if post.sends else 'a receive from'} rank {peer}"
            block = [sim.block_of(post.tensor)]
            stream.enqueue(word, block if post.sends else [], [] if post.sends else block)
        plain = [
            sim.contents(post.tensor).detach().clone() if post.sends else torch.empty_like(sim.contents(post.tensor))
            for post in posts
        ]
        carried = [Post(post.sends, data, peer, post.tag) for post, data in zip(posts, plain, strict=True)]
        handles = self._inner.post(carried)
        clock = stream.clock.copy()
        return [
            _Message(handle, clock, post.tensor, None if post.sends else data)
            for handle, post, data in zip(handles, posts, plain, strict=True)
        ]
