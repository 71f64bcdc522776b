"""Names of ranges in traces of PyTorch's pipeline schedules."""

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
    """Computation of a range, by its name."""

    kind: int
    stage: int | None
    """None if the rank has only one stage."""
    microbatch: int


class NamedRange(NamedTuple):
    """A computation in a trace, and the times at which the host entered and left its range."""

    named: ComputationName
    start_ns: int
    end_ns: int
    entered_ns: int
    left_ns: int


def computation_of(name: str) -> ComputationName | None:
    """Return the computation of a range with this name; None if it is not part of a pipeline.

    `ScheduleInterleaved1F1B` and other schedules with several stages per rank write ``PP:1F0``, `ScheduleGPipe` writes
    ``Forward 0``. Other runtimes may use either. Raise `InputError` if the range contains a forward and a backward,
    whose separate times are unknown.
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
    """Return, for a range that posts a message, whether it is of a forward, stage and microbatch; else None."""
    found = _MESSAGE.fullmatch(name)
    return None if found is None else (found[3] == "F", int(found[1]), int(found[4]))


def step_of(name: str) -> int | None:
    """Return the number of an iteration marked by ``profiler.step()``; else None."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None
