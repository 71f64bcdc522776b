"""The messages of a plan: each send, receive and wait is about one of them, and they are numbered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.plan.action import MESSAGE_VERBS, Action, ExecutionPlan


class Message(NamedTuple):
    """Name of a message: direction, producer chunk, microbatch, sub-microbatch, consumer chunk if needed."""

    direction: str
    chunk: str
    microbatch: int
    sub_microbatch: int
    target: str


@dataclass(frozen=True, slots=True)
class Messages:
    """Names are compared once; from then on a message is a number.

    Attributes
    ----------
    rows : tuple of tuple of int or None
        Per rank and step the message that the action is about; None for other actions.
    number_of : dict of tuple to int
        By name, a `Message` or the plain tuple.
    """

    rows: tuple[tuple[int | None, ...], ...]
    number_of: dict[tuple[str, str, int, int, str], int]

    def names(self) -> list[Message]:
        """Names by number."""
        return [Message(*name) for name in self.number_of]


def messages_of(plan: ExecutionPlan) -> Messages:
    """Number the messages of all actions, in the order in which ranks name them."""
    number_of: dict[tuple[str, str, int, int, str], int] = {}
    return Messages(
        tuple(
            tuple(
                number_of.setdefault(_name(action), len(number_of)) if action.verb in MESSAGE_VERBS else None
                for action in actions
            )
            for actions in plan.ranks
        ),
        number_of,
    )


def _name(action: Action) -> tuple[str, str, int, int, str]:
    return (action.verb[1], action.chunk, action.microbatch, action.sub_microbatch, action.target)
