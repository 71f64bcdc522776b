"""Transports of messages between ranks. The executor uses only the `Transport` protocol."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import ExecutionError
from pipeloom.runtime.launch import accelerator


class Handle(Protocol):
    """A send or receive in progress."""

    def wait(self) -> object:
        """Return when it is complete. Raise if it never will be."""
        ...


class Transport(Protocol):
    """Posts sends and receives without waiting.

    A sent tensor must stay unchanged and alive until its handle was waited for. ``tag`` is unique within an iteration
    and equal at both ends. A transport may ignore it, because plans order messages alike at both ends.
    """

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post the send of a contiguous tensor to a pipeline rank."""
        ...

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post the receive into a contiguous tensor of the sender's shape and dtype."""
        ...


class Post(NamedTuple):
    """A send or receive to be posted together with others."""

    sends: bool
    tensor: Tensor
    peer: int
    tag: int


class JoiningTransport(Transport, Protocol):
    """Posts adjacent messages with one peer as one batched operation."""

    batches_p2p: bool

    def post(self, posts: Sequence[Post]) -> list[Handle]:
        """Post messages together, and return a handle for each."""
        ...


def batches_p2p(transport: Transport) -> TypeGuard[JoiningTransport]:
    """Return whether a transport batches messages."""
    return bool(getattr(transport, "batches_p2p", False))


class TorchTransport:
    """Point-to-point messages of `torch.distributed`.

    The group's timeout bounds every wait. If the peer is lost or later than that, the wait raises and the group cannot
    be used anymore. With NCCL, call `connect` first.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or None
        The pipeline's ranks in pipeline order. None is the default group.
    use_tags : bool
        False gives every message tag 0, so that gloo matches messages in order, as NCCL does.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, use_tags: bool = True) -> None:
        self.group, self.use_tags = group, use_tags

    @cached_property
    def _process_group(self) -> Any:
        """The group itself. Calling it directly avoids the checks of isend and irecv for every message."""
        if dist.get_rank(self.group) < 0:
            raise ExecutionError("this process is not in the group of its messages")
        return dist.group.WORLD if self.group is None else self.group

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        handle: Handle = self._process_group.send([tensor], peer, tag if self.use_tags else 0)
        return handle

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        handle: Handle = self._process_group.recv([tensor], peer, tag if self.use_tags else 0)
        return handle

    def connect(self, device: torch.device | str) -> None:
        """Exchange a message with every peer. All ranks of the group call it together before the first plan.

        NCCL connects two ranks when their first message is posted, and the host then waits until the other end posts it
        too. Plans are proven deadlock-free for posts that do not block. A rank that waits for a receive from one peer,
        while another peer waits in its first send to it, could wait forever. All connections are therefore made here,
        pair after pair in one order on all ranks. Gloo is connected from the start.
        """
        dist.all_reduce(torch.zeros(1, device=device), group=self.group)
        greet_peers(self, dist.get_rank(self.group), dist.get_world_size(self.group), device)
        accelerator.synchronize(device)


def greet_peers(transport: Transport, rank: int, num_ranks: int, device: torch.device | str) -> None:
    """Exchange a number with every other rank, pair after pair in one order. All ranks call it together.

    Even if a post blocks until the peer arrives, both ranks of the first unfinished pair are at it.
    """
    for low, high in itertools.combinations(range(num_ranks), 2):
        if rank not in (low, high):
            continue
        peer = high if rank == low else low
        out, into = torch.zeros(2, 1, device=device).unbind()
        # One message in each direction, because connections have a direction.
        if batches_p2p(transport):
            for handle in transport.post([Post(True, out, peer, 0), Post(False, into, peer, 0)]):
                handle.wait()
            continue
        for sends in (rank == low, rank != low):
            (transport.send(out, peer, 0) if sends else transport.receive(into, peer, 0)).wait()


TransportName = Literal["direct", "host"]
"""``direct`` sends messages from device to device, ``host`` through host memory."""


class _StagedMessage:
    """A message in progress through host memory."""

    def __init__(self, device: Tensor, host: Tensor) -> None:
        self.device, self.host = device, host
        self.posted: Future[Handle] = Future()

    def wait(self) -> None:
        """Return when it is complete."""
        self.posted.result().wait()


class _StagedReceive(_StagedMessage):
    def wait(self) -> None:
        """Return when the message has arrived and its copy to the device is enqueued in the current stream."""
        super().wait()
        # Torch does not reuse the pinned memory before the copy is done.
        self.device.copy_(self.host, non_blocking=True)


class HostTransport(TorchTransport):
    """Messages by gloo between copies in host memory, for tensors on any device.

    Several processes can then share a GPU, which NCCL does not support. A thread posts the sends in order, each when
    its copy is complete. A wait for a message blocks the host. Copies are made on the CPU as well, so that this can be
    tested without a GPU.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, use_tags: bool = True) -> None:
        super().__init__(group, use_tags=use_tags)
        self._sends: queue.SimpleQueue[tuple[_StagedMessage, Any, int, int]] = queue.SimpleQueue()
        threading.Thread(target=self._post_sends, name="host transport", daemon=True).start()

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        staged = _StagedMessage(tensor, accelerator.empty_on_host(tensor))
        staged.host.copy_(tensor.detach(), non_blocking=True)
        copied = None
        if accelerator.on_accelerator(tensor.device):
            copied = accelerator.new_event(tensor.device)
            copied.record()
        self._sends.put((staged, copied, peer, tag))
        return staged

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        staged = _StagedReceive(tensor, accelerator.empty_on_host(tensor))
        staged.posted.set_result(super().receive(staged.host, peer, tag))
        return staged

    def connect(self, device: torch.device | str) -> None:
        """Do nothing, because gloo is connected from the start."""

    def _post_sends(self) -> None:
        while True:
            staged, copied, peer, tag = self._sends.get()
            try:
                if copied is not None:
                    accelerator.select(staged.device.device)
                    copied.synchronize()
                staged.posted.set_result(super().send(staged.host, peer, tag))
            except BaseException as error:  # told to who waits
                staged.posted.set_exception(error)


class BatchedTransport(TorchTransport):
    """Posts messages with one peer that are adjacent at both ends as one operation, which is faster with NCCL.

    All messages use the group's single communicator, in which NCCL runs a rank's operations one by one, for all peers.
    Plans must be lowered with ``single_communicator=True``. Either all ranks use this transport or none.
    """

    batches_p2p = True

    def post(self, posts: Sequence[Post]) -> list[Handle]:
        operations = [
            dist.P2POp(
                dist.isend if post.sends else dist.irecv,
                post.tensor,
                group=self.group,
                group_peer=post.peer,
                tag=post.tag if self.use_tags else 0,
            )
            for post in posts
        ]
        works: list[Handle] = list(dist.batch_isend_irecv(operations))
        # NCCL returns one handle for all.
        return works if len(works) == len(posts) else works[:1] * len(posts)


MatchOrder = Literal["tags", "in order", "serial"]


@dataclass
class _Mail:
    tensor: Tensor
    sends: bool
    tag: int
    done: bool = False


@dataclass
class ThreadHub:
    """Connects ranks that are threads of one process: for a single rank, and for fast tests of many plans.

    Parameters
    ----------
    order : {"tags", "in order", "serial"}
        ``"in order"`` follows NCCL's rules: each pair of ranks has one stream for both directions, whose next
        message runs once both ends have posted it. Tags are ignored. With ``"serial"``, each rank has one stream,
        as if all ranks shared one communicator. An operation of several messages must then be the same at both
        ends.
    timeout_s : float
        Seconds after which a wait raises `ExecutionError`.
    batches_p2p : bool
        Whether its transports post several messages as one operation.
    lazy : bool
        Whether a rank that posts its first message with a peer blocks until the peer does so too, as with NCCL.
    """

    order: MatchOrder = "tags"
    timeout_s: float = 60.0
    batches_p2p: bool = False
    lazy: bool = False
    condition: threading.Condition = field(default_factory=threading.Condition)
    mail: defaultdict[tuple[int, int], list[_Mail]] = field(default_factory=lambda: defaultdict(list))
    """Posted messages that are not complete yet, by rank and peer."""
    queues: defaultdict[int, list[tuple[int, list[_Mail]]]] = field(default_factory=lambda: defaultdict(list))
    """For ranks with one stream each, their operations that are not complete yet, with their peers."""
    known: set[tuple[int, int]] = field(default_factory=set)
    """Pairs of a rank and a peer with which it has posted a message."""
    failed: bool = False

    def transport(self, rank: int) -> Transport:
        """Return the transport of one rank."""
        return _ThreadTransport(self, rank, self.batches_p2p)

    def fail(self) -> None:
        """End all waits, because a rank has failed."""
        with self.condition:
            self.failed = True
            self.condition.notify_all()

    def post(self, rank: int, peer: int, mails: list[_Mail]) -> None:
        """Add an operation of one or more messages, and complete all that match."""
        with self.condition:
            self.known.add((rank, peer))
            self.condition.notify_all()
            if self.lazy:
                self._wait_for(lambda: (peer, rank) in self.known, rank, peer)
            if self.order == "serial":
                self.queues[rank].append((peer, mails))
                self._serve_heads(rank)
                return
            for mail in mails:
                self._take(rank, peer, mail)

    def _serve_heads(self, rank: int) -> None:
        """Complete the operations of ranks whose next operations match."""
        at_hand = [rank]
        while at_hand and not self.failed:
            here = at_hand.pop()
            if not self.queues[here]:
                continue
            peer, mails = self.queues[here][0]
            if not self.queues[peer] or self.queues[peer][0][0] != here:
                continue
            others = self.queues[peer].pop(0)[1]
            self.queues[here].pop(0)
            for sends in (True, False):
                mine = [mail for mail in mails if mail.sends == sends]
                theirs = [mail for mail in others if mail.sends != sends]
                if len(mine) != len(theirs):
                    self.failed = True
                    self.condition.notify_all()
                    return
                for here_mail, other in zip(mine, theirs, strict=True):
                    self._serve(here_mail, other)
            at_hand += [here, peer]

    def _take(self, rank: int, peer: int, mail: _Mail) -> None:
        """Add one message for matching by pair of ranks or by tag."""
        self.mail[rank, peer].append(mail)
        mine, theirs = self.mail[rank, peer], self.mail[peer, rank]
        if self.order == "in order":
            while mine and theirs:
                self._serve(mine.pop(0), theirs.pop(0))
        else:
            for other in theirs:
                if other.tag == mail.tag and other.sends != mail.sends:
                    mine.remove(mail)
                    theirs.remove(other)
                    self._serve(mail, other)
                    break

    def _serve(self, here: _Mail, there: _Mail) -> None:
        source, target = (here, there) if here.sends else (there, here)
        if here.sends == there.sends or source.tensor.shape != target.tensor.shape:
            self.failed = True
        else:
            target.tensor.copy_(source.tensor)
            here.done = there.done = True
        self.condition.notify_all()

    def wait(self, rank: int, peer: int, mail: _Mail) -> None:
        """Block until a message is complete."""
        with self.condition:
            self._wait_for(lambda: mail.done, rank, peer)

    def _wait_for(self, is_over: Callable[[], bool], rank: int, peer: int) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not is_over():
            if self.failed:
                raise ExecutionError(f"rank {rank}: another rank failed, or messages do not match")
            if not self.condition.wait(deadline - time.monotonic()):
                raise ExecutionError(f"rank {rank}: no answer of rank {peer} within {self.timeout_s} s")


@dataclass(frozen=True)
class _ThreadHandle:
    hub: ThreadHub
    rank: int
    peer: int
    mail: _Mail

    def wait(self) -> None:
        self.hub.wait(self.rank, self.peer, self.mail)


@dataclass(frozen=True)
class _ThreadTransport:
    hub: ThreadHub
    rank: int
    batches_p2p: bool = False

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post a send. Its tensor is read when both ends have posted."""
        return self.post([Post(True, tensor, peer, tag)])[0]

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        return self.post([Post(False, tensor, peer, tag)])[0]

    def post(self, posts: Sequence[Post]) -> list[Handle]:
        (peer,) = {post.peer for post in posts}
        mails = [_Mail(post.tensor.detach(), post.sends, post.tag) for post in posts]
        with torch.no_grad():
            self.hub.post(self.rank, peer, mails)
        return [_ThreadHandle(self.hub, self.rank, peer, mail) for mail in mails]
