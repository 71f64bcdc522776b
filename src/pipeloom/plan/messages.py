"""The messages of a plan, numbered, and which neighbouring ones are posted as one operation."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.plan.action import Action, ExecutionPlan, Verb


@dataclass(frozen=True, slots=True)
class Messages:
    """Names are compared once; from then on a message is a number.

    Attributes
    ----------
    rows : tuple of tuple of int or None
        Per rank and step the message that the action is about; None for other actions.
    number_of : dict of tuple to int
        By name: direction, producer chunk, microbatch, sub-microbatch, consumer chunk if needed, stream.
    """

    rows: tuple[tuple[int | None, ...], ...]
    number_of: dict[tuple[str, str, int, int, str, str], int]


def messages_of(plan: ExecutionPlan) -> Messages:
    """Number the messages of all actions, in the order in which ranks name them."""
    number_of: dict[tuple[str, str, int, int, str, str], int] = {}
    return Messages(
        tuple(
            tuple(
                number_of.setdefault(_name(action), len(number_of)) if action.verb.is_message else None
                for action in actions
            )
            for actions in plan.ranks
        ),
        number_of,
    )


def _name(action: Action) -> tuple[str, str, int, int, str, str]:
    return (action.verb.direction, action.chunk, action.microbatch, action.sub_microbatch, action.target, action.stream)


_End = tuple[Verb, str, int, int, str, str]


def joined_posts(plan: ExecutionPlan, rank: int) -> frozenset[int]:
    """Steps of a rank whose send or receive forms one operation with that of its next step.

    Both are messages with one peer, and neighbours in the same order in the peer's list too. So the two ends of an
    operation always consist of the same messages, as NCCL asks, and joining adds nothing that a plan could wait for:
    whatever comes between the two on neither rank comes between them nowhere.
    """
    steps = _neighbours(plan, rank)
    peers = {plan.ranks[rank][step].peer for step in steps}
    there: set[tuple[int | None, _End, _End]] = set()
    for peer in peers:
        if peer is None or not 0 <= peer < plan.num_ranks:
            continue
        theirs = plan.ranks[peer]
        there |= {
            (peer, _end(theirs[step]), _end(theirs[step + 1]))
            for step in _neighbours(plan, peer)
            if theirs[step].peer == rank
        }
    mine = plan.ranks[rank]
    return frozenset(
        step for step in steps if (mine[step].peer, _other_end(mine[step]), _other_end(mine[step + 1])) in there
    )


def _neighbours(plan: ExecutionPlan, rank: int) -> list[int]:
    """Steps at which a post is followed by another with the same peer."""
    actions = plan.ranks[rank]
    return [
        step
        for step in range(len(actions) - 1)
        if actions[step].verb.is_post
        and actions[step + 1].verb.is_post
        and actions[step].peer == actions[step + 1].peer
    ]


def _end(action: Action) -> _End:
    return (action.verb, *_name(action)[1:])


def _other_end(action: Action) -> _End:
    return (action.verb.other_end, *_end(action)[1:])
