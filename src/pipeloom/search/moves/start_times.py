"""Moves of starts, and what they see."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeloom.compiled import Array, callee
from pipeloom.compiled.random import draw
from pipeloom.search.moves.move import Move


class StartTimes(NamedTuple):
    """Starts of all tasks. A move changes ``shifted`` in place; list scheduling then repairs the order of the starts.

    Attributes
    ----------
    start, shifted : array, shape (num_tasks,)
        Starts before and after the move, in ns. They are equal before the move.
    is_backward : array, shape (num_tasks,)
        0 for forwards, 1 for other tasks.
    component_start, component_task : array
        Tasks of every component in compressed rows, each in the order of the starts. A component is mostly a
        microbatch.
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


class ExchangeComponents(Move):
    """Let each of two components begin when the other did."""

    name = "exchange components"
    weight = 2

    @staticmethod
    @callee
    def propose(now: StartTimes) -> None:
        """Shift all tasks of two components by the difference of their starts."""
        one, other = draw_component(now), draw_component(now)
        first = now.component_start
        distance = now.start[now.component_task[first[other]]] - now.start[now.component_task[first[one]]]
        for i in range(first[other], first[other + 1]):
            now.shifted[now.component_task[i]] -= distance
        for i in range(first[one], first[one + 1]):
            now.shifted[now.component_task[i]] += distance


class ShiftComponent(Move):
    """Shift all tasks of a component."""

    name = "shift a component"
    weight = 1

    @staticmethod
    @callee
    def propose(now: StartTimes) -> None:
        """Add one shift to all starts of a component."""
        component, shift = draw_component(now), draw_shift(now, 8.0)
        for i in range(now.component_start[component], now.component_start[component + 1]):
            now.shifted[now.component_task[i]] += shift


class ShiftDirection(Move):
    """Shift all forwards, or all other tasks, of a component."""

    name = "shift one direction"
    weight = 2

    @staticmethod
    @callee
    def propose(now: StartTimes) -> None:
        """Add one shift to the starts of one direction."""
        component, shift = draw_component(now), draw_shift(now, 8.0)
        direction = draw(now.random) % 2
        for i in range(now.component_start[component], now.component_start[component + 1]):
            task = now.component_task[i]
            if now.is_backward[task] == direction:
                now.shifted[task] += shift


class ShiftTask(Move):
    """Shift one task."""

    name = "shift a task"
    weight = 5

    @staticmethod
    @callee
    def propose(now: StartTimes) -> None:
        """Add a shift to one start."""
        now.shifted[draw(now.random) % len(now.shifted)] += draw_shift(now, 2.0)


class JoltWindow(Move):
    """Shift every start within a window of up to four spans, each by another amount."""

    name = "jolt a window"
    weight = 6

    @staticmethod
    @callee
    def propose(now: StartTimes) -> None:
        """Add a small shift to each start in the window."""
        random = now.random
        begin = now.start[draw(random) % len(now.start)]
        end = begin + 4 * now.span * (draw(random) % 1024) / 1024
        amplitude = now.span * (draw(random) % 1024) / 1024
        for task in range(len(now.shifted)):
            if begin <= now.start[task] and now.start[task] < end:
                now.shifted[task] += np.int64(amplitude * ((draw(random) % 1024) / 1024 - 0.5))
