"""RankPlan: the part of a plan that one rank needs, so that it does not have to decode actions of other ranks."""

from __future__ import annotations

import msgspec

from pipeloom.bounds import Number
from pipeloom.plan.action import Action, ExecutionPlan, Verb
from pipeloom.plan.messages import joined_posts
from pipeloom.plan.routes import Unit
from pipeloom.spec import Layout


class RankPlan(msgspec.Struct, frozen=True):
    """Actions of one rank, and the information that it needs about other ranks."""

    num_ranks: Number
    iteration: Number
    layout: str
    """Digest of the layout that the plan is for."""
    rank: Number
    actions: tuple[Action, ...]
    longest: Number
    """Largest number of actions of any rank. After an iteration, all ranks send times padded to this number."""
    joined: tuple[Number, ...] | None = None
    """Steps whose send or receive is batched with the next one (`joined_posts`); None if nothing is batched."""
    placed: tuple[Unit, ...] = ()
    """Units of all forwards of replicated modules on all ranks, because only the plan defines the rank of each part."""


def rank_plan(plan: ExecutionPlan, layout: Layout, rank: int, *, batches_p2p: bool) -> RankPlan:
    """Return the part of a plan that one rank needs.

    Parameters
    ----------
    batches_p2p : bool
        Whether consecutive messages are batched into one operation (`BACKENDS`).
    """
    return _part(plan, rank, _placed(plan, layout), batches_p2p)


def rank_plans(plan: ExecutionPlan, layout: Layout, *, batches_p2p: bool) -> tuple[RankPlan, ...]:
    """Return the parts of all ranks; see `rank_plan`."""
    placed = _placed(plan, layout)
    return tuple(_part(plan, rank, placed, batches_p2p) for rank in range(plan.num_ranks))


def _part(plan: ExecutionPlan, rank: int, placed: tuple[Unit, ...], batches_p2p: bool) -> RankPlan:
    return RankPlan(
        plan.num_ranks,
        plan.iteration,
        plan.layout,
        rank,
        plan.ranks[rank],
        max(map(len, plan.ranks)),
        tuple(sorted(joined_posts(plan, rank))) if batches_p2p else None,
        placed,
    )


def _placed(plan: ExecutionPlan, layout: Layout) -> tuple[Unit, ...]:
    replicated = {module.name for module in layout.modules if module.on_ranks == "replicated"}
    if not replicated:
        return ()
    number_of = {
        name: i
        for i, (name, chunk) in enumerate(zip(layout.chunk_names, layout.chunks, strict=True))
        if chunk.module in replicated
    }
    return tuple(
        Unit(number_of[action.chunk], action.microbatch, action.sub_microbatch)
        for actions in plan.ranks
        for action in actions
        if action.verb is Verb.F and action.chunk in number_of
    )
