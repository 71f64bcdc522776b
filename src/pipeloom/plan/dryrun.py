"""Run a plan on paper under the matching rules of NCCL and gloo, and show where it stops."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from pipeloom.plan.action import SEND_VERBS, Action, ExecutionPlan
from pipeloom.plan.messages import WAIT_VERBS, Messages, messages_of
from pipeloom.plan.text import action_text

Rules = Literal["nccl", "nccl batched", "gloo"]
"""NCCL: messages of a pair of ranks are served one after the other, both directions in one stream, and tags are
ignored. NCCL batched: sends and receives that stand together are one operation, and a rank's operations are served one
after the other, whoever the peers are. Gloo: by tag, in any order. All: a message is done once both ends have posted
it (rendezvous)."""


@dataclass(frozen=True)
class Stop:
    """Where a dry run stopped: the step of every rank, and why."""

    steps: tuple[int, ...]
    reason: str


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
        self.plan, self.rules, self.messages = plan, rules, messages.rows
        self.steps = [0] * plan.num_ranks
        self.posted: defaultdict[tuple[int, int], list[tuple[Action, int]]] = defaultdict(list)
        """What a rank has posted with a peer, in order: key (rank, peer)."""
        self.by_name: dict[tuple[int, int, str, int], int] = {}
        self.done: list[set[int]] = [set() for _ in range(plan.num_ranks)]
        """Per rank, messages complete at it."""
        self.mismatch = ""
        self.batches: list[list[dict[int, Action]]] = [[] for _ in range(plan.num_ranks)]
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
                if message not in self.done[rank]:
                    return self._stop(
                        f"'{action_text(action)}' of rank {rank} is never matched by rank {peer}"
                    )
        return None

    def _stop(self, reason: str) -> Stop:
        return Stop(tuple(self.steps), reason)

    def _advance(self, rank: int) -> bool:
        actions, messages, done = self.plan.ranks[rank], self.messages[rank], self.done[rank]
        batched = self.rules == "nccl batched"
        begin = step = self.steps[rank]
        while step < len(actions):
            message, action = messages[step], actions[step]
            waits = message is not None and action.verb in WAIT_VERBS
            if batched and (message is None or waits):
                self.growing[rank] = False
                self._serve_batches()
            if waits:
                if message not in done:
                    break
            elif message is not None:
                self._post(rank, action, message)
            if self.mismatch:
                self.steps[rank] = step
                return True
            step += 1
        self.steps[rank] = step
        if step == len(actions) and self.growing[rank]:
            self.growing[rank] = False
            self._serve_batches()
        return step > begin

    def _post(self, rank: int, action: Action, message: int) -> None:
        peer = -1 if action.peer is None else action.peer
        posted = self.posted[rank, peer]
        posted.append((action, message))
        if self.rules == "nccl batched":
            if not self.growing[rank]:
                self.batches[rank].append({})
                self.growing[rank] = True
            self.batches[rank][-1][message] = action
        elif self.rules == "nccl":
            self._serve_in_order(rank, peer, len(posted) - 1)
        else:
            self._serve_by_name(rank, peer, action, message)

    def _serve_in_order(self, rank: int, peer: int, index: int) -> None:
        """Match what a rank has just posted with what its peer has posted in the same place of their common stream.

        The end that comes second to a place finds the other one there, so places are matched in order.
        """
        theirs = self.posted[peer, rank]
        if index >= len(theirs):
            return
        (here, mine), (there, other) = self.posted[rank, peer][index], theirs[index]
        if (here.verb in SEND_VERBS) == (there.verb in SEND_VERBS) or mine != other:
            self.mismatch = (
                f"between ranks {rank} and {peer}, message {index} is '{action_text(here)}' on rank {rank} "
                f"but '{action_text(there)}' on rank {peer}"
            )
            return
        self._complete(rank, peer, here, there, mine)

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

    def _head(self, rank: int) -> dict[int, Action]:
        """The operation that a rank is at."""
        if not 0 <= rank < len(self.batches) or not self.batches[rank]:
            return {}
        return {} if len(self.batches[rank]) == 1 and self.growing[rank] else self.batches[rank][0]

    def _serve_by_name(self, rank: int, peer: int, action: Action, message: int) -> None:
        role = "send" if action.verb in SEND_VERBS else "receive"
        other = "receive" if role == "send" else "send"
        index = self.by_name.pop((peer, rank, other, message), None)
        if index is None:
            self.by_name[rank, peer, role, message] = len(self.posted[rank, peer]) - 1
        else:
            self._complete(rank, peer, action, self.posted[peer, rank][index][0], message)

    def _complete(self, rank: int, peer: int, here: Action, there: Action, message: int) -> None:
        if here.shape != there.shape or here.dtype != there.dtype:
            self.mismatch = (
                f"'{action_text(here)}' of rank {rank} meets '{action_text(there)}' of rank {peer}"
            )
            return
        self.done[rank].add(message)
        self.done[peer].add(message)
