"""Transport: how a rank's messages reach another. The executor knows no more than `Transport`."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import ExecutionError


class Handle(Protocol):
    """A send or receive under way."""

    def wait(self) -> object:
        """Return when it is done; raise where it never will be."""
        ...


class Transport(Protocol):
    """Posts sends and receives; neither waits.

    A sent tensor must stay unchanged, and alive, until its handle was waited for. ``tag`` is unique within an
    iteration and equal at both ends; a transport may ignore it, because plans order messages alike at both.
    """

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post the send of a contiguous tensor to a pipeline rank."""
        ...

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post the receive into a contiguous tensor of the sender's shape and dtype."""
        ...


class TorchTransport:
    """Point-to-point messages of `torch.distributed`.

    Waiting is bounded by the group's own timeout: when the peer is gone or late beyond it, the wait raises
    and the group is of no more use.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or None
        The pipeline's ranks, in pipeline order; None: the default group.
    use_tags : bool
        False gives every message tag 0, so that gloo matches in order, as NCCL does.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, use_tags: bool = True) -> None:
        self.group, self.use_tags = group, use_tags

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post the send of a contiguous tensor to a pipeline rank."""
        work = dist.isend(tensor, group=self.group, group_dst=peer, tag=tag if self.use_tags else 0)
        return _posted(work, "send to", peer)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post the receive into a contiguous tensor of the sender's shape and dtype."""
        work = dist.irecv(tensor, group=self.group, group_src=peer, tag=tag if self.use_tags else 0)
        return _posted(work, "receive from", peer)


def _posted(work: dist.Work | None, what: str, peer: int) -> Handle:
    if work is None:
        raise ExecutionError(f"{what} pipeline rank {peer}: this process is not in the group")
    return work


class Post(NamedTuple):
    """A send or receive that is to be posted together with others."""

    sends: bool
    tensor: Tensor
    peer: int
    tag: int


class BatchedTransport(TorchTransport):
    """Joins messages that a plan posts one after the other into one operation, as NCCL gains by.

    NCCL then serves a rank's operations one by one, whoever the peers are, so that plans must be lowered with
    ``batched=True``; all ranks use this transport or none.
    """

    def post(self, posts: Sequence[Post]) -> list[Handle]:
        """Post them together; a handle for each."""
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
        # NCCL gives one handle for all.
        return works if len(works) == len(posts) else works[:1] * len(posts)


MatchOrder = Literal["tags", "in order"]


@dataclass
class _Mail:
    tensor: Tensor
    sends: bool
    tag: int
    done: bool = False


@dataclass
class ThreadHub:
    """Ranks as threads of one process: for one rank, and for testing many plans quickly.

    Parameters
    ----------
    order : {"tags", "in order"}
        ``"in order"`` keeps NCCL's rules: one stream for each pair of ranks, shared by both directions, whose
        next message is served once both ends have posted it; tags are ignored.
    timeout_s : float
        A wait that takes longer raises `ExecutionError`.
    """

    order: MatchOrder = "tags"
    timeout_s: float = 60.0
    condition: threading.Condition = field(default_factory=threading.Condition)
    mail: defaultdict[tuple[int, int], list[_Mail]] = field(default_factory=lambda: defaultdict(list))
    """What a rank has posted with a peer and is not served yet: key (rank, peer)."""
    failed: bool = False

    def transport(self, rank: int) -> Transport:
        """The transport of one rank."""
        return _ThreadTransport(self, rank)

    def fail(self) -> None:
        """End all waits: a rank has died."""
        with self.condition:
            self.failed = True
            self.condition.notify_all()

    def post(self, rank: int, peer: int, mail: _Mail) -> None:
        """Take a message in, and serve what can be."""
        with self.condition:
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
        """Block until a message is served."""
        deadline = time.monotonic() + self.timeout_s
        with self.condition:
            while not mail.done:
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
        """Block until the other end has posted too."""
        self.hub.wait(self.rank, self.peer, self.mail)


@dataclass(frozen=True)
class _ThreadTransport:
    hub: ThreadHub
    rank: int

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post a send; its tensor is read when both ends have posted."""
        return self._post(tensor, peer, tag, True)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Handle:
        """Post a receive."""
        return self._post(tensor, peer, tag, False)

    def _post(self, tensor: Tensor, peer: int, tag: int, sends: bool) -> Handle:
        mail = _Mail(tensor.detach(), sends, tag)
        with torch.no_grad():
            self.hub.post(self.rank, peer, mail)
        return _ThreadHandle(self.hub, self.rank, peer, mail)
