"""Run a plan on paper under the matching rules of NCCL and gloo, and show where it stops."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipeloom.plan.action import RECEIVE_VERBS, SEND_VERBS, Action, ExecutionPlan
from pipeloom.plan.text import action_text

Rules = Literal["nccl", "nccl batched", "gloo"]
"""NCCL: messages of a pair of ranks are served one after the other, both directions in one stream, and tags are
ignored. NCCL batched: sends and receives that stand together are one operation, and a rank's operations are served one
after the other, whoever the peers are. Gloo: by tag, in any order. All: a message is done once both ends have posted
it (rendezvous)."""


_WAITS = frozenset({"WF", "WB", "DF", "DB"})
_ABOUT_MESSAGES = SEND_VERBS | RECEIVE_VERBS | _WAITS


class Message(NamedTuple):
    """Name of a message: direction, producer chunk, microbatch, sub-microbatch, consumer chunk if needed."""

    direction: str
    chunk: str
    microbatch: int
    sub_microbatch: int
    target: str


@dataclass(frozen=True)
class Stop:
    """Where a dry run stopped: the step of every rank, and why."""

    steps: tuple[int, ...]
    reason: str


def message_of(action: Action) -> Message:
    """Name of the message that a send, receive or wait is about."""
    return Message(action.verb[1], action.chunk, action.microbatch, action.sub_microbatch, action.target)


Messages = tuple[tuple[Message | None, ...], ...]
"""Per rank and step the message that the action is about, worked out once; None for other actions."""


def messages_of(plan: ExecutionPlan) -> Messages:
    """Name the messages of all actions."""
    return tuple(
        tuple(message_of(action) if action.verb in _ABOUT_MESSAGES else None for action in actions)
        for actions in plan.ranks
    )


def dry_run(plan: ExecutionPlan, rules: Rules, messages: Messages | None = None) -> Stop | None:
    """Execute a plan without computing; None when every rank reaches its end and every message its receiver."""
    return _DryRun(plan, rules, messages_of(plan) if messages is None else messages).run()


def grid(plan: ExecutionPlan, steps: tuple[int, ...], before: int = 2, after: int = 3) -> str:
    """Ranks by steps around a place; each rank's place is marked with ``>``."""
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
        self.posted: defaultdict[tuple[int, int], list[tuple[Action, Message]]] = defaultdict(list)
        """What a rank has posted with a peer, in order: key (rank, peer)."""
        self.served: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.by_name: dict[tuple[int, int, str, Message], int] = {}
        self.done: set[tuple[int, Message]] = set()
        """Messages complete at a rank."""
        self.mismatch = ""
        self.batches: list[list[dict[Message, Action]]] = [[] for _ in range(plan.num_ranks)]
        """Per rank, its operations that are not done yet, with what is missing in each; the last may still grow."""
        self.growing = [False] * plan.num_ranks

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
                return self._stop(f"rank {rank} waits for ever at '{action_text(action).strip()}'")
        for (rank, peer), posted in sorted(self.posted.items()):
            for action, message in posted:
                if (rank, message) not in self.done:
                    return self._stop(
                        f"'{action_text(action)}' of rank {rank} is never matched by rank {peer}"
                    )
        return None

    def _stop(self, reason: str) -> Stop:
        return Stop(tuple(self.steps), reason)

    def _advance(self, rank: int) -> bool:
        actions, messages, begin = self.plan.ranks[rank], self.messages[rank], self.steps[rank]
        while self.steps[rank] < len(actions):
            message = messages[self.steps[rank]]
            if message is None or actions[self.steps[rank]].verb in _WAITS:
                self.growing[rank] = False
                if self.rules == "nccl batched":
                    self._serve_batches()
                    if self.mismatch:
                        return True
            if message is not None:
                action = actions[self.steps[rank]]
                if action.verb not in _WAITS:
                    self._post(rank, action, message)
                    if self.mismatch:
                        return True
                elif (rank, message) not in self.done:
                    break
            self.steps[rank] += 1
        if self.steps[rank] == len(actions) and self.growing[rank]:
            self.growing[rank] = False
            self._serve_batches()
        return self.steps[rank] > begin

    def _post(self, rank: int, action: Action, message: Message) -> None:
        peer = -1 if action.peer is None else action.peer
        self.posted[rank, peer].append((action, message))
        if self.rules == "nccl batched":
            if not self.growing[rank]:
                self.batches[rank].append({})
                self.growing[rank] = True
            self.batches[rank][-1][message] = action
        elif self.rules == "nccl":
            self._serve_in_order(rank, peer)
        else:
            self._serve_by_name(rank, peer, action, message)

    def _serve_in_order(self, rank: int, peer: int) -> None:
        """Match what both ends have at the head of their common stream, as long as there is something."""
        while True:
            index = self.served[min(rank, peer), max(rank, peer)]
            mine, theirs = self.posted[rank, peer], self.posted[peer, rank]
            if index >= len(mine) or index >= len(theirs):
                return
            (here, my_message), (there, their_message) = mine[index], theirs[index]
            sends = (here.verb in SEND_VERBS) + (there.verb in SEND_VERBS)
            if sends != 1 or my_message != their_message:
                self.mismatch = (
                    f"between ranks {rank} and {peer}, message {index} is '{action_text(here)}' on rank {rank} "
                    f"but '{action_text(there)}' on rank {peer}"
                )
                return
            self._complete(rank, peer, here, there, my_message)
            self.served[min(rank, peer), max(rank, peer)] = index + 1

    def _serve_batches(self) -> None:
        """Match what stands in the operations that all ranks are at, as long as there is something."""
        moved = True
        while moved and not self.mismatch:
            moved = False
            for rank, batches in enumerate(self.batches):
                if not batches or (len(batches) == 1 and self.growing[rank]):
                    continue
                for message, action in list(batches[0].items()):
                    peer = -1 if action.peer is None else action.peer
                    theirs = self._head(peer)
                    other = theirs.get(message)
                    if other is not None and (action.verb in SEND_VERBS) != (other.verb in SEND_VERBS):
                        self._complete(rank, peer, action, other, message)
                        del batches[0][message], theirs[message]
                        moved = True
                if not batches[0]:
                    batches.pop(0)
                    moved = True

    def _head(self, rank: int) -> dict[Message, Action]:
        """The operation that a rank is at."""
        if not 0 <= rank < len(self.batches) or not self.batches[rank]:
            return {}
        return {} if len(self.batches[rank]) == 1 and self.growing[rank] else self.batches[rank][0]

    def _serve_by_name(self, rank: int, peer: int, action: Action, message: Message) -> None:
        role = "send" if action.verb in SEND_VERBS else "receive"
        other = "receive" if role == "send" else "send"
        index = self.by_name.pop((peer, rank, other, message), None)
        if index is None:
            self.by_name[rank, peer, role, message] = len(self.posted[rank, peer]) - 1
        else:
            self._complete(rank, peer, action, self.posted[peer, rank][index][0], message)

    def _complete(self, rank: int, peer: int, here: Action, there: Action, message: Message) -> None:
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            self.mismatch = (
                f"'{action_text(here)}' of rank {rank} meets '{action_text(there)}' of rank {peer}"
            )
            return
        self.done.add((rank, message))
        self.done.add((peer, message))
