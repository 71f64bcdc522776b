"""Action and ExecutionPlan: what every rank does, step by step, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

Verb = Literal[
    "F", "B", "I", "W", "RC", "OF", "LD", "SF", "SB", "RF", "RB", "WF", "WB", "DF", "DB", "UN", "RG", "OS"
]
"""Computation, recomputation, offload and load, sends, receives posted, waits, sends done, data parallelism."""

COMPUTE_VERBS = frozenset({"F", "B", "I", "W"})
MEMORY_VERBS = frozenset({"RC", "OF", "LD"})
"""Recomputation and moving, which a task's planned time contains."""
SEND_VERBS = frozenset({"SF", "SB"})
RECEIVE_VERBS = frozenset({"RF", "RB"})
WAIT_VERBS = frozenset({"WF", "WB", "DF", "DB"})
POST_VERBS = SEND_VERBS | RECEIVE_VERBS
MESSAGE_VERBS = POST_VERBS | WAIT_VERBS
"""What is about a message: sent, received, or waited for at either end."""


class Action(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One step of one rank.

    A message is named by the chunk that produced the activation, with that chunk's microbatch and
    sub-microbatch: ``SF vision.3 5.1`` sends the activation, ``SB vision.3 5.1`` sends its gradient back.
    So both directions of one hand-over have one name, and a microbatch that gathered several
    sub-microbatches answers each of them with a message of its own.

    A plan has thousands of them, and none refers to another, so Python's collector is spared them.
    """

    verb: Verb
    chunk: str = ""
    microbatch: int = 0
    sub_microbatch: int = 0
    peer: int | None = None
    """Rank at the other end of a message."""
    target: str = ""
    """Consumer chunk of a message, given only where the producer has more than one consumer, and with ``:`` and the
    sub-microbatch where several of them are of one chunk."""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    strategy: str = ""


class ExecutionPlan(msgspec.Struct, frozen=True):
    """Actions of every rank for one iteration."""

    num_ranks: int
    iteration: int
    layout: str
    """Digest of the layout that the plan is for."""
    ranks: tuple[tuple[Action, ...], ...]
    format: Literal["pipeloom.plan/1"] = "pipeloom.plan/1"
