"""Which neighbouring messages of a plan form one operation."""

from __future__ import annotations

from pipeloom.plan.action import RECEIVE_VERBS, SEND_VERBS, Action, ExecutionPlan

_POSTS = SEND_VERBS | RECEIVE_VERBS
_End = tuple[str, str, int, int, str]


def joined_posts(plan: ExecutionPlan, rank: int) -> frozenset[int]:
    """Steps of a rank whose send or receive forms one operation with that of its next step.

    Both are messages with one peer, and neighbours in the same order in the peer's list too. So the two ends of an
    operation always consist of the same messages, as NCCL asks, and joining adds nothing that a plan could wait for:
    whatever comes between the two on neither rank comes between them nowhere.

    Parameters
    ----------
    plan : ExecutionPlan
    rank : int
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
        step
        for step in steps
        if (mine[step].peer, _other_end(mine[step]), _other_end(mine[step + 1])) in there
    )


def _neighbours(plan: ExecutionPlan, rank: int) -> list[int]:
    """Steps at which a post is followed by another with the same peer."""
    actions = plan.ranks[rank]
    return [
        step
        for step in range(len(actions) - 1)
        if actions[step].verb in _POSTS
        and actions[step + 1].verb in _POSTS
        and actions[step].peer == actions[step + 1].peer
    ]


def _end(action: Action) -> _End:
    return (action.verb, action.chunk, action.microbatch, action.sub_microbatch, action.target)


def _other_end(action: Action) -> _End:
    verb = ("R" if action.verb[0] == "S" else "S") + action.verb[1]
    return (verb, *_end(action)[1:])
