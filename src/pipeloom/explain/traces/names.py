"""Names that PyTorch's pipeline schedules give their ranges in a trace."""

from __future__ import annotations

import re
from typing import NamedTuple

from pipeloom.errors import InputError
from pipeloom.taskgraph import BACKWARD, FORWARD, KIND_NAMES

_ACTION = re.compile(r"PP:(\d+)(F|B|I|W)(\d+)")
_MESSAGE = re.compile(r"PP:(\d+)(SEND|RECV)_(F|B)(\d+)")
_SINGLE = re.compile(r"(Forward|Backward) (\d+)")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_OVERLAPPED = "OVERLAP_F_B"


class ComputationName(NamedTuple):
    """What a range computes."""

    kind: int
    stage: int | None
    """None: the rank's only stage."""
    microbatch: int


class NamedRange(NamedTuple):
    """A computation of a trace, and when the host entered and left its range."""

    named: ComputationName
    start_ns: int
    end_ns: int
    entered_ns: int
    left_ns: int


def computation_of(name: str) -> ComputationName | None:
    """What a range with this name computes; None: nothing of a pipeline.

    ``PP:1F0`` is what `ScheduleInterleaved1F1B` and everything else with several stages a rank writes, ``Forward 0``
    what `ScheduleGPipe` writes, and whoever annotates a runtime of his own may write either.

    Raises
    ------
    InputError
        A range with a forward and a backward in one, which have no times of their own.
    """
    if found := _ACTION.fullmatch(name):
        return ComputationName(KIND_NAMES.index(found[2]), int(found[1]), int(found[3]))
    if found := _SINGLE.fullmatch(name):
        return ComputationName(FORWARD if found[1] == "Forward" else BACKWARD, None, int(found[2]))
    if name.startswith("PP:") and name.endswith(_OVERLAPPED):
        raise InputError(
            f"range {name}", "is a forward and a backward in one", "record a schedule that does not overlap them"
        )
    return None


def message_of(name: str) -> tuple[bool, int, int] | None:
    """Whether of a forward, stage and microbatch of a range that posts a message; None: it is another one."""
    found = _MESSAGE.fullmatch(name)
    return None if found is None else (found[3] == "F", int(found[1]), int(found[4]))


def step_of(name: str) -> int | None:
    """Number of an iteration, as ``profiler.step()`` marks it."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None
