"""Actions of a plan as columns of numbers, for vectorized checks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from pipeloom.errors import PlanError
from pipeloom.plan.action import ExecutionPlan, Verb
from pipeloom.taskgraph import BoolArray, IntArray

_Value = TypeVar("_Value", bound=Hashable)

VERBS = tuple(Verb)
_CODE = {verb: code for code, verb in enumerate(VERBS)}


def verbs_that(holds: Iterable[bool]) -> BoolArray:
    """Return one boolean per verb, by its code."""
    return np.fromiter(holds, np.bool_, len(VERBS))


IS_COMPUTE = verbs_that(verb.is_compute for verb in VERBS)
IS_UNIT = verbs_that(verb.is_unit for verb in VERBS)
IS_CHUNK = verbs_that(verb.is_chunk for verb in VERBS)
IS_MESSAGE = verbs_that(verb.is_message for verb in VERBS)
IS_WAIT = verbs_that(verb.is_wait for verb in VERBS)
_BACK = np.fromiter((verb.direction == "B" for verb in VERBS), np.int64, len(VERBS))
_POST = np.fromiter((_CODE[verb.post] for verb in VERBS), np.int64, len(VERBS))


def code(verb: Verb) -> int:
    """Return the number of a verb in a table."""
    return _CODE[verb]


@dataclass(frozen=True, slots=True, eq=False)
class PlanTable:
    """All actions of a plan, one per row, rank by rank.

    Attributes
    ----------
    start : array, shape (num_ranks + 1,)
        Rows of rank r are ``start[r]`` to ``start[r + 1]``.
    rank, verb, chunk : array, shape (num_rows,)
        ``verb`` and ``chunk`` index `VERBS` and ``chunks``.
    chunks : tuple of str
        Chunk names in order of first occurrence.
    unit : array, shape (num_rows,)
        Number of the action's chunk, microbatch and sub-microbatch.
    messages : array
        Rows that post one end of a message or wait for it.
    message, end : array, shape (len(messages),)
        Number of the message, and number of its end. The post of an end and the wait for it have the same number.
    targets : dict of (str, str) to int
        Numbers of the consumers and streams in names of messages.
    names : array
        Name of each message as one number, in increasing order (`number_of`).
    """

    plan: ExecutionPlan
    start: IntArray
    rank: IntArray
    verb: IntArray
    chunk: IntArray
    chunks: tuple[str, ...]
    unit: IntArray
    messages: IntArray
    message: IntArray
    end: IntArray
    targets: dict[tuple[str, str], int]
    names: IntArray

    def number_of(self, units: IntArray, targets: IntArray, back: IntArray) -> IntArray:
        """Return the messages by unit, target (consumer and stream) and direction; -1 if there is none."""
        names = (units * len(self.targets) + targets) * 2 + back
        if not len(self.names):
            return np.full(len(names), -1)
        place = np.minimum(np.searchsorted(self.names, names), len(self.names) - 1)
        return np.where((self.names[place] == names) & (targets >= 0), place, -1)

    def messages_by_step(self) -> list[list[int | None]]:
        """Return each action's message, as in ``message``, by rank and step; None for actions without one."""
        numbers: list[int | None] = [None] * len(self.verb)
        for row, number in zip(self.messages.tolist(), self.message.tolist(), strict=True):
            numbers[row] = number
        return [numbers[first:last] for first, last in pairwise(self.start.tolist())]

    def step(self, row: int) -> int:
        """Return the step of an action in its rank's list."""
        return int(row - self.start[self.rank[row]])


def table_of(plan: ExecutionPlan) -> PlanTable:
    """Read a plan's actions into columns, or raise `PlanError` if a microbatch or sub-microbatch exceeds 64 bits."""
    actions = [action for listed in plan.ranks for action in listed]
    lengths = [len(listed) for listed in plan.ranks]
    verb = np.array([_CODE[action.verb] for action in actions], np.int64)
    chunk, chunks = numbered([action.chunk for action in actions])
    try:
        microbatch = np.array([action.microbatch for action in actions], np.int64)
        sub = np.array([action.sub_microbatch for action in actions], np.int64)
    except OverflowError:
        raise PlanError("the plan has a microbatch or sub-microbatch beyond 64 bits") from None
    unit = joint_numbers(chunk, microbatch, sub)
    rank = np.repeat(np.arange(len(lengths)), lengths)
    messages = np.flatnonzero(IS_MESSAGE[verb])
    verbs = verb[messages]
    target, targets = numbered([(actions[row].target, actions[row].stream) for row in messages.tolist()])
    names, message = np.unique((unit[messages] * len(targets) + target) * 2 + _BACK[verbs], return_inverse=True)
    return PlanTable(
        plan=plan,
        start=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
        rank=rank,
        verb=verb,
        chunk=chunk,
        chunks=tuple(chunks),
        unit=unit,
        messages=messages,
        message=message,
        end=joint_numbers(message, rank[messages], _POST[verbs]),
        targets={name: number for number, name in enumerate(targets)},
        names=names,
    )


def numbered(values: Sequence[_Value]) -> tuple[IntArray, list[_Value]]:
    """Number equal values in order of first occurrence; return the numbers and the values by number."""
    number = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return np.array([number[value] for value in values], np.int64), list(number)


def joint_numbers(*columns: IntArray) -> IntArray:
    """Give equal rows of several columns one number, below the number of rows."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        if not len(column):
            break
        low, high = int(column.min()), int(column.max())
        if (high - low + 1) * (int(key.max()) + 1) >= 1 << 62:
            column, key = (np.unique(each, return_inverse=True)[1] for each in (column, key))
            low, high = 0, int(column.max())
        key = key * (high - low + 1) + (column - low)
    if len(key) and key.max() < 8 * len(key):
        seen = np.zeros(int(key.max()) + 1, np.bool_)
        seen[key] = True
        return (np.cumsum(seen) - 1)[key]
    return np.unique(key, return_inverse=True)[1]
