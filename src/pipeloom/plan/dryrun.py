"""Rules of backends for messages, and a dry run under these rules that shows where a plan stops."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeloom.plan.action import Action, ExecutionPlan
from pipeloom.plan.messages import messages_of
from pipeloom.plan.text import action_text

BackendName = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Backend:
    """Rules of a backend for point-to-point messages.

    Attributes
    ----------
    single_communicator : bool
        Whether the backend may serve all messages of a rank one by one. Plans are lowered and verified for this case.
        NCCL serves the messages of a single communicator one by one. A group has a single communicator if it was made
        with a device, or if messages are batched.
    batches_p2p : bool
        Whether consecutive messages between two ranks are batched (batched P2P). NCCL then exchanges both directions
        at once. Gloo always posts them one by one.
    """

    single_communicator: bool
    batches_p2p: bool


BACKENDS: dict[BackendName, Backend] = {
    "gloo": Backend(single_communicator=False, batches_p2p=False),
    "nccl": Backend(single_communicator=True, batches_p2p=True),
}


def backend_of(device_type: str) -> BackendName:
    """Return the backend for messages between devices of a type: gloo for ``"cpu"``, NCCL for accelerators."""
    return "gloo" if device_type in ("cpu", "meta") else "nccl"


Messages = Sequence[Sequence[int | None]]
"""Number of the message of each action by rank and step; None for actions without one."""
Rules = Literal["nccl", "nccl serial", "gloo"]
"""Matching rules.

- ``nccl``: messages of a pair of ranks are served one by one, both directions in one stream, and tags are ignored. This
  holds if each pair has its own communicator.
- ``nccl serial``: all messages of a rank are served one by one, for all peers. This holds for a single communicator.
- ``gloo``: messages are matched by tag, in any order.

Under all rules, a message completes once both ends have posted it (rendezvous), and posting does not block. With NCCL,
posting does not block only if the communicators exist (`TorchTransport.connect`).
"""


@dataclass(frozen=True)
class Stop:
    """The step of every rank at which a dry run stopped, and the reason."""

    steps: tuple[int, ...]
    reason: str


def dry_run(plan: ExecutionPlan, rules: Rules, messages: Messages | None = None) -> Stop | None:
    """Run a plan without computing. Return None if every rank ends and every message is received."""
    return _DryRun(plan, rules, messages_of(plan) if messages is None else messages).run()


def grid(plan: ExecutionPlan, steps: tuple[int, ...], before: int = 2, after: int = 3) -> str:
    """Return a table of ranks by steps around ``steps``; each rank's step is marked with ``>``."""
    cells = [
        [
            (">" if step == place else " ") + action_text(actions[step]).split(" shape=")[0]
            if 0 <= step < len(actions)
            else (">(end)" if step == place else "")
            for step in range(place - before, place + after + 1)
        ]
        for actions, place in zip(plan.ranks, steps, strict=True)
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(before + after + 1)]
    lines = []
    for rank, (row, place) in enumerate(zip(cells, steps, strict=True)):
        padded = " |".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
        lines.append(f"rank {rank} step {place:>4}:{padded}".rstrip())
    return "\n".join(lines)


class _DryRun:
    def __init__(self, plan: ExecutionPlan, rules: Rules, messages: Messages) -> None:
        self.plan, self.rules, self.messages = plan, rules, messages
        self.steps = [0] * plan.num_ranks
        self.posted: defaultdict[tuple[int, int], list[tuple[Action, int]]] = defaultdict(list)
        """Posts of a rank with a peer, in order, by (rank, peer)."""
        self.by_name: dict[tuple[int, int, str, int], int] = {}
        self.done: list[set[int]] = [set() for _ in range(plan.num_ranks)]
        """Completed messages of each rank."""
        self.mismatch = ""
        self.queues: list[deque[tuple[int, Action, int]]] = [deque() for _ in range(plan.num_ranks)]
        """Incomplete messages of each rank with their peers, under the rules ``nccl serial``."""

    def run(self) -> Stop | None:
        moved = True
        while moved and not self.mismatch:
            moved = False
            for rank in range(self.plan.num_ranks):
                moved |= self._advance(rank)
        if self.mismatch:
            return self._stop(self.mismatch)
        for rank, actions in enumerate(self.plan.ranks):
            if self.steps[rank] < len(actions):
                action = actions[self.steps[rank]]
                return self._stop(f"rank {rank} waits forever at '{action_text(action).strip()}'")
        for (rank, peer), posted in sorted(self.posted.items()):
            for action, message in posted:
                if message not in self.done[rank]:
                    return self._stop(f"'{action_text(action)}' of rank {rank} is never matched by rank {peer}")
        return None

    def _stop(self, reason: str) -> Stop:
        return Stop(tuple(self.steps), reason)

    def _advance(self, rank: int) -> bool:
        actions, messages, done = self.plan.ranks[rank], self.messages[rank], self.done[rank]
        begin = step = self.steps[rank]
        while step < len(actions):
            message, action = messages[step], actions[step]
            if message is not None and action.verb.is_wait:
                if message not in done:
                    break
            elif message is not None:
                self._post(rank, action, message)
            if self.mismatch:
                self.steps[rank] = step
                return True
            step += 1
        self.steps[rank] = step
        return step > begin

    def _post(self, rank: int, action: Action, message: int) -> None:
        peer = -1 if action.peer is None else action.peer
        posted = self.posted[rank, peer]
        posted.append((action, message))
        if self.rules == "nccl serial":
            self.queues[rank].append((peer, action, message))
            self._serve_next(rank)
        elif self.rules == "nccl":
            self._serve_in_order(rank, peer, len(posted) - 1)
        else:
            self._serve_by_name(rank, peer, action, message)

    def _serve_in_order(self, rank: int, peer: int, index: int) -> None:
        """Match the latest post of a rank with the post of the peer at the same index of their common stream.

        The later of the two posts finds the earlier one, so indices are matched in order.
        """
        theirs = self.posted[peer, rank]
        if index < len(theirs):
            self._match(rank, peer, self.posted[rank, peer][index], theirs[index], f"message {index}")

    def _serve_next(self, rank: int) -> None:
        """Match the next messages of ranks while they match each other."""
        todo = [rank]
        while todo and not self.mismatch:
            here = todo.pop()
            if not self.queues[here]:
                continue
            peer, action, message = self.queues[here][0]
            theirs = self.queues[peer] if 0 <= peer < len(self.queues) else None
            if theirs and theirs[0][0] == here:
                _, other_action, other = theirs[0]
                self._match(here, peer, (action, message), (other_action, other), "the next message")
                self.queues[here].popleft()
                theirs.popleft()
                todo += [here, peer]

    def _match(self, rank: int, peer: int, mine: tuple[Action, int], theirs: tuple[Action, int], what: str) -> None:
        """Complete a message if both posts are its two ends; otherwise report the mismatch."""
        (here, message), (there, other) = mine, theirs
        if here.verb.is_send == there.verb.is_send or message != other:
            self.mismatch = (
                f"between ranks {rank} and {peer}, {what} is '{action_text(here)}' on rank {rank} "
                f"but '{action_text(there)}' on rank {peer}"
            )
            return
        self._complete(rank, peer, here, there, message)

    def _serve_by_name(self, rank: int, peer: int, action: Action, message: int) -> None:
        role = "send" if action.verb.is_send else "receive"
        other = "receive" if role == "send" else "send"
        index = self.by_name.pop((peer, rank, other, message), None)
        if index is None:
            self.by_name[rank, peer, role, message] = len(self.posted[rank, peer]) - 1
        else:
            self._complete(rank, peer, action, self.posted[peer, rank][index][0], message)

    def _complete(self, rank: int, peer: int, here: Action, there: Action, message: int) -> None:
        if here.shape != there.shape or here.dtype != there.dtype:
            self.mismatch = f"'{action_text(here)}' of rank {rank} meets '{action_text(there)}' of rank {peer}"
            return
        self.done[rank].add(message)
        self.done[peer].add(message)
