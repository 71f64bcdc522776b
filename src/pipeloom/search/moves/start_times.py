"""Moves of starts, and what they see."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeloom.compiled import Array, callee
from pipeloom.compiled.random import draw


class StartTimes(NamedTuple):
    """Starts of all tasks. A move changes ``shifted`` in place; list scheduling then repairs the order of the starts.

    Attributes
    ----------
    start, shifted : array, shape (num_tasks,)
        Starts before and after the move, in ns. They are equal before the move.
    is_backward : array, shape (num_tasks,)
        0 for forwards, 1 for other tasks.
    component_start, component_task : array
        Tasks of every component in compressed rows, each in the order of the starts at the last restart. In tabu
        search, each microbatch is a component.
    span : float
        Typical shift of a start, in ns: the time between two microbatches.
    random : array
        State of the random numbers; see `pipeloom.compiled.random`.
    """

    start: Array
    shifted: Array
    is_backward: Array
    component_start: Array
    component_task: Array
    span: float
    random: Array


@callee
def draw_component(now: StartTimes) -> Any:
    """Draw a component."""
    return draw(now.random) % (len(now.component_start) - 1)


@callee
def draw_shift(now: StartTimes, spans: float) -> Any:
    """Draw a shift in ns of up to a number of spans in either direction, mostly a small one."""
    part = (draw(now.random) % (1 << 20)) / (1 << 20)
    shift = np.int64(spans * now.span * part * part * part)
    return shift if draw(now.random) % 2 == 0 else -shift
