"""Dependencies between computations of a chain of stages."""

from __future__ import annotations

from collections.abc import Container

from pipeloom.explain.traces.traced import Unit
from pipeloom.taskgraph import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT


def input_of(unit: Unit, units: Container[Unit], num_stages: int) -> Unit | None:
    """Return the computation of the neighboring stage whose output ``unit`` takes; None if there is none."""
    if unit.kind == WEIGHT_GRADIENT:
        return None
    if unit.kind == FORWARD:
        before = Unit(FORWARD, unit.stage - 1, unit.microbatch)
        return before if unit.stage > 0 else None
    if unit.stage == num_stages - 1:
        return None
    for kind in (BACKWARD, INPUT_GRADIENT):
        after = Unit(kind, unit.stage + 1, unit.microbatch)
        if after in units:
            return after
    return None


def output_of(unit: Unit, units: Container[Unit], num_stages: int) -> Unit | None:
    """Return the computation of the neighboring stage that takes the output of ``unit``; None if there is none."""
    if unit.kind == WEIGHT_GRADIENT:
        return None
    if unit.kind == FORWARD:
        after = Unit(FORWARD, unit.stage + 1, unit.microbatch)
        return after if unit.stage < num_stages - 1 else None
    for kind in (BACKWARD, INPUT_GRADIENT):
        before = Unit(kind, unit.stage - 1, unit.microbatch)
        if unit.stage and before in units:
            return before
    return None
