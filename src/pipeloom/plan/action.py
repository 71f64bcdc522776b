"""Verb, Action and ExecutionPlan: what every rank does, step by step, as data."""

from __future__ import annotations

import enum
from functools import cache, cached_property
from typing import Literal

import msgspec

from pipeloom.bounds import Number, Signed
from pipeloom.spec import TRAITS, word_strategies


class Verb(enum.StrEnum):
    """What an action does. A member equals its own name as a string, which is what the text form of plans has.

    What is asked of a member is worked out once and is then a plain attribute: loops over thousands of actions ask.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's name of an input gradient
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

    # Verbs are keys of many look-ups, and that of an enumeration is in Python.
    __hash__ = str.__hash__

    @cached_property
    def is_compute(self) -> bool:
        """What a task graph has tasks for."""
        return self in (Verb.F, Verb.B, Verb.I, Verb.W)

    @cached_property
    def is_memory(self) -> bool:
        """Recomputation and moving to the host and back, which a task's planned time contains."""
        return self in (Verb.RECOMPUTE, Verb.OFFLOAD, Verb.LOAD)

    @cached_property
    def is_unit(self) -> bool:
        """About one chunk's work on one (sub-)microbatch."""
        return self.is_compute or self.is_memory

    @cached_property
    def is_chunk(self) -> bool:
        """About a whole chunk, whatever the microbatch."""
        return self in (Verb.UNSHARD, Verb.REDUCE_GRAD)

    @cached_property
    def is_send(self) -> bool:
        """Posts the sending end of a message; waits for nothing."""
        return self in (Verb.SEND_F, Verb.SEND_B)

    @cached_property
    def is_receive(self) -> bool:
        """Posts the receiving end of a message; waits for nothing."""
        return self in (Verb.RECV_F, Verb.RECV_B)

    @cached_property
    def is_post(self) -> bool:
        """A send or a receive."""
        return self.is_send or self.is_receive

    @cached_property
    def is_wait(self) -> bool:
        """Waits until a message has arrived, or until a send is done."""
        return self in _POST_OF

    @cached_property
    def is_message(self) -> bool:
        """Posts one end of a message or waits for it."""
        return self.is_post or self.is_wait

    @cached_property
    def direction(self) -> str:
        """Of a message: ``"F"`` for an activation on its way forward, ``"B"`` for its gradient; else empty."""
        if not self.is_message:
            return ""
        return "F" if self in (Verb.SEND_F, Verb.RECV_F, Verb.WAIT_F, Verb.WAIT_SEND_F) else "B"

    @cached_property
    def post(self) -> Verb:
        """Of what is about a message: the verb that posts this end of it."""
        return _POST_OF.get(self, self)

    @cached_property
    def wait(self) -> Verb:
        """Of what is about a message: the verb that waits for this end of it."""
        return next((wait for wait, post in _POST_OF.items() if post is self), self)

    @cached_property
    def other_end(self) -> Verb:
        """Of a send the receive that it meets, and of a receive the send."""
        ends = {Verb.SEND_F: Verb.RECV_F, Verb.SEND_B: Verb.RECV_B}
        return ends.get(self) or next(send for send, receive in ends.items() if receive is self)


_POST_OF = {
    Verb.WAIT_F: Verb.RECV_F,
    Verb.WAIT_B: Verb.RECV_B,
    Verb.WAIT_SEND_F: Verb.SEND_F,
    Verb.WAIT_SEND_B: Verb.SEND_B,
}
"""By wait, what it waits for."""


@cache
def promised_verbs(strategy: str) -> frozenset[Verb]:
    """What a unit does besides its forward and backward, by the strategy that its forward names.

    Raises
    ------
    InputError
        The strategy names what is none.
    """
    traits = [TRAITS[each] for each in word_strategies(strategy)]
    promised = {Verb.RECOMPUTE} if any(each.recomputes != "nothing" for each in traits) else set()
    return frozenset(promised | ({Verb.OFFLOAD, Verb.LOAD} if any(each.offloads for each in traits) else set()))


class Action(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One step of one rank.

    A message is named by the chunk that produced the activation, with that chunk's microbatch and
    sub-microbatch: ``SEND_F vision.3 5.1`` sends the activation, ``SEND_B vision.3 5.1`` sends its gradient back.
    So both directions of one boundary transfer have one name, and a microbatch that gathered several
    sub-microbatches answers each of them with a message of its own. A message about a stream of that unit has the
    stream's name too.

    A plan has thousands of them, and none refers to another, so Python's collector is spared them.
    """

    verb: Verb
    chunk: str = ""
    microbatch: Number = 0
    sub_microbatch: Number = 0
    peer: Signed | None = None
    """Rank at the other end of a message."""
    target: str = ""
    """Consumer chunk of a message, given only where the producer has more than one consumer, and with ``:`` and the
    sub-microbatch where several of them are of one chunk."""
    shape: tuple[Number, ...] | None = None
    dtype: str = ""
    strategy: str = ""
    stream: str = ""
    """Of a message: which of the producer's streams it is about; empty: its output."""


class ExecutionPlan(msgspec.Struct, frozen=True):
    """Actions of every rank for one iteration."""

    num_ranks: Number
    iteration: Number
    layout: str
    """Digest of the layout that the plan is for."""
    ranks: tuple[tuple[Action, ...], ...]
    format: Literal["pipeloom.plan/2", "pipeloom.plan/3"] = "pipeloom.plan/2"
    """The second where any message is about a stream."""
