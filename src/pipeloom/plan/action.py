"""Verb, Action and ExecutionPlan: the actions of every rank."""

from __future__ import annotations

import enum
from functools import cache, cached_property
from typing import Literal

import msgspec

from pipeloom.bounds import Number, Signed
from pipeloom.spec import TRAITS, word_strategies


class Verb(enum.StrEnum):
    """The verb of an action. A member equals its name as a string, which is its text form in plans.

    Properties are cached, since loops over thousands of actions read them.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the usual name of an input gradient
    W = "W"
    RECOMPUTE = "RECOMPUTE"
    OFFLOAD = "OFFLOAD"
    LOAD = "LOAD"
    SEND_F = "SEND_F"
    SEND_B = "SEND_B"
    RECV_F = "RECV_F"
    RECV_B = "RECV_B"
    WAIT_F = "WAIT_F"
    WAIT_B = "WAIT_B"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    UNSHARD = "UNSHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OPTIMIZER_STEP = "OPTIMIZER_STEP"

    # Verbs are keys of many look-ups. The hash of an enumeration runs in Python, that of a string does not.
    __hash__ = str.__hash__

    @cached_property
    def is_compute(self) -> bool:
        """Whether task graphs have tasks for the verb."""
        return self in (Verb.F, Verb.B, Verb.I, Verb.W)

    @cached_property
    def is_memory(self) -> bool:
        """Whether the verb recomputes, offloads or loads. The planned time of a task includes these actions."""
        return self in (Verb.RECOMPUTE, Verb.OFFLOAD, Verb.LOAD)

    @cached_property
    def is_unit(self) -> bool:
        """Whether the verb is about the work of one chunk on one (sub-)microbatch."""
        return self.is_compute or self.is_memory

    @cached_property
    def is_chunk(self) -> bool:
        """Whether the verb is about a whole chunk, for all microbatches."""
        return self in (Verb.UNSHARD, Verb.REDUCE_GRAD)

    @cached_property
    def is_send(self) -> bool:
        """Whether the verb posts the send of a message without waiting."""
        return self in (Verb.SEND_F, Verb.SEND_B)

    @cached_property
    def is_receive(self) -> bool:
        """Whether the verb posts the receive of a message without waiting."""
        return self in (Verb.RECV_F, Verb.RECV_B)

    @cached_property
    def is_post(self) -> bool:
        """Whether the verb is a send or a receive."""
        return self.is_send or self.is_receive

    @cached_property
    def is_wait(self) -> bool:
        """Whether the verb waits for a receive or a send to complete."""
        return self in _POST_OF

    @cached_property
    def is_message(self) -> bool:
        """Whether the verb posts one end of a message or waits for it."""
        return self.is_post or self.is_wait

    @cached_property
    def direction(self) -> str:
        """``"F"`` for a message with an activation, ``"B"`` for one with a gradient, else empty."""
        if not self.is_message:
            return ""
        return "F" if self in (Verb.SEND_F, Verb.RECV_F, Verb.WAIT_F, Verb.WAIT_SEND_F) else "B"

    @cached_property
    def post(self) -> Verb:
        """The verb that posts the same end of a message; the verb itself for other verbs."""
        return _POST_OF.get(self, self)

    @cached_property
    def wait(self) -> Verb:
        """The verb that waits for the same end of a message; the verb itself for other verbs."""
        return next((wait for wait, post in _POST_OF.items() if post is self), self)

    @cached_property
    def other_end(self) -> Verb:
        """The receive that matches a send, or the send that matches a receive."""
        ends = {Verb.SEND_F: Verb.RECV_F, Verb.SEND_B: Verb.RECV_B}
        return ends.get(self) or next(send for send, receive in ends.items() if receive is self)


_POST_OF = {
    Verb.WAIT_F: Verb.RECV_F,
    Verb.WAIT_B: Verb.RECV_B,
    Verb.WAIT_SEND_F: Verb.SEND_F,
    Verb.WAIT_SEND_B: Verb.SEND_B,
}
"""For each wait, the post that it waits for."""


@cache
def promised_verbs(strategy: str) -> frozenset[Verb]:
    """Return the memory actions of a unit, by the strategy of its forward.

    Raises
    ------
    InputError
        The strategy has an unknown name.
    """
    traits = [TRAITS[each] for each in word_strategies(strategy)]
    promised = {Verb.RECOMPUTE} if any(each.recomputes != "nothing" for each in traits) else set()
    return frozenset(promised | ({Verb.OFFLOAD, Verb.LOAD} if any(each.offloads for each in traits) else set()))


class Action(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One step of one rank.

    A message is named by the producer of the activation: its chunk, microbatch and sub-microbatch.
    ``SEND_F vision.3 5.1`` sends the activation, and ``SEND_B vision.3 5.1`` sends its gradient back, so both
    directions of a boundary transfer have the same name. A microbatch that joins several sub-microbatches sends a
    gradient to each of them. A message with a stream also has the name of the stream.

    A plan has thousands of actions. They do not refer to each other, so they are excluded from garbage collection.
    """

    verb: Verb
    chunk: str = ""
    microbatch: Number = 0
    sub_microbatch: Number = 0
    peer: Signed | None = None
    """Rank at the other end of a message."""
    target: str = ""
    """Consumer chunk of a message, if the producer has several consumers; with ``:`` and the sub-microbatch if several
    consumers are of one chunk."""
    shape: tuple[Number, ...] | None = None
    dtype: str = ""
    strategy: str = ""
    stream: str = ""
    """Stream of the producer that a message carries; empty for its output."""


class ExecutionPlan(msgspec.Struct, frozen=True):
    """Actions of every rank for one iteration."""

    num_ranks: Number
    iteration: Number
    layout: str
    """Digest of the layout that the plan is for."""
    ranks: tuple[tuple[Action, ...], ...]
    format: Literal["pipeloom.plan/2", "pipeloom.plan/3"] = "pipeloom.plan/2"
    """``pipeloom.plan/3`` if any message carries a stream."""
