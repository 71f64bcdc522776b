"""Action and ExecutionPlan: what every rank does, step by step, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

Verb = Literal[
    "F", "B", "I", "W", "RC", "OF", "LD", "SF", "SB", "RF", "RB", "WF", "WB", "DF", "DB", "UN", "RG", "OS"
]
"""Computation, recomputation, offload and load, sends, receives posted, waits, sends done, data parallelism."""

COMPUTE_VERBS = frozenset({"F", "B", "I", "W"})
SEND_VERBS = frozenset({"SF", "SB"})
RECEIVE_VERBS = frozenset({"RF", "RB"})


class Action(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of one rank.

    ``chunk`` is the chunk that computes or, for messages, the chunk that produced the tensor: an activation
    comes from the earlier chunk's F, a gradient from the later chunk's B or I. A gradient that goes from one
    microbatch back to several sub-microbatches is one message per sub-microbatch, numbered by the receiver.
    """

    verb: Verb
    chunk: str = ""
    microbatch: int = 0
    sub_microbatch: int = 0
    peer: int | None = None
    """Rank at the other end of a message."""
    target: str = ""
    """Chunk that a message goes to."""
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
