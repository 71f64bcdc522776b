"""RankPlan: what one rank needs of a plan, so that no rank receives or reads the actions of all others."""

from __future__ import annotations

import msgspec

from pipeloom.bounds import Number
from pipeloom.plan.action import Action, ExecutionPlan, Verb
from pipeloom.plan.messages import joined_posts
from pipeloom.plan.routes import Unit
from pipeloom.spec import Layout


class RankPlan(msgspec.Struct, frozen=True):
    """One rank's actions of a plan, and the little that it must know of the others'."""

    num_ranks: Number
    iteration: Number
    layout: str
    """Digest of the layout that the plan is for."""
    rank: Number
    actions: tuple[Action, ...]
    longest: Number
    """Most actions of any rank: all ranks send room for so many times when an iteration has run."""
    joined: tuple[Number, ...] | None = None
    """Steps whose send or receive is one operation with the next one's (`joined_posts`); None: none need be known."""
    placed: tuple[Unit, ...] = ()
    """All forwards of replicated modules on all ranks: only the plan says where each part of them is worked on."""


def rank_plan(plan: ExecutionPlan, layout: Layout, rank: int, *, joins: bool) -> RankPlan:
    """Return what one rank needs of a plan.

    Parameters
    ----------
    layout : Layout
        The plan's.
    joins : bool
        Whether messages that are neighbours on both ends are posted as one operation (`BACKENDS`).
    """
    return _part(plan, rank, _placed(plan, layout), joins)


def rank_plans(plan: ExecutionPlan, layout: Layout, *, joins: bool) -> tuple[RankPlan, ...]:
    """Return what every rank needs of a plan; see `rank_plan`."""
    placed = _placed(plan, layout)
    return tuple(_part(plan, rank, placed, joins) for rank in range(plan.num_ranks))


def _part(plan: ExecutionPlan, rank: int, placed: tuple[Unit, ...], joins: bool) -> RankPlan:
    return RankPlan(
        plan.num_ranks,
        plan.iteration,
        plan.layout,
        rank,
        plan.ranks[rank],
        max(map(len, plan.ranks)),
        tuple(sorted(joined_posts(plan, rank))) if joins else None,
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
