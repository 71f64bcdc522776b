"""Numbers of the messages of a plan, and consecutive messages that are posted as one operation."""

from __future__ import annotations

from pipeloom.plan.action import Action, ExecutionPlan, Verb


def messages_of(plan: ExecutionPlan) -> tuple[tuple[int | None, ...], ...]:
    """Number the messages of a plan in order of first occurrence.

    Return the message of each action, by rank and step; None for actions without one.
    """
    number_of: dict[tuple[str, str, int, int, str, str], int] = {}
    return tuple(
        tuple(
            number_of.setdefault(_name(action), len(number_of)) if action.verb.is_message else None
            for action in actions
        )
        for actions in plan.ranks
    )


def _name(action: Action) -> tuple[str, str, int, int, str, str]:
    return (action.verb.direction, action.chunk, action.microbatch, action.sub_microbatch, action.target, action.stream)


_End = tuple[Verb, str, int, int, str, str]


def joined_posts(plan: ExecutionPlan, rank: int) -> frozenset[int]:
    """Return the steps of a rank whose send or receive is batched with the one of the next step.

    Both messages have the same peer, and they are consecutive in the same order in the list of the peer. Both ends of a
    batched operation therefore have the same messages, as NCCL requires. Batching adds no dependency, since no action
    is between the two messages on either rank.
    """
    steps = _consecutive(plan, rank)
    peers = {plan.ranks[rank][step].peer for step in steps}
    there: set[tuple[int | None, _End, _End]] = set()
    for peer in peers:
        if peer is None or not 0 <= peer < plan.num_ranks:
            continue
        theirs = plan.ranks[peer]
        there |= {
            (peer, _end(theirs[step]), _end(theirs[step + 1]))
            for step in _consecutive(plan, peer)
            if theirs[step].peer == rank
        }
    mine = plan.ranks[rank]
    return frozenset(
        step for step in steps if (mine[step].peer, _other_end(mine[step]), _other_end(mine[step + 1])) in there
    )


def _consecutive(plan: ExecutionPlan, rank: int) -> list[int]:
    """Return the steps with a post that is followed by another post with the same peer."""
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
