"""Positions of segments from an order of groups."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.search.compiled import kernel, pointer
from pipeloom.search.problem import Problem
from pipeloom.search.scratch import Scratch


@kernel
def expand(p: Problem, s: Scratch, order: npt.NDArray[Any]) -> None:
    """Turn an order of groups (forward groups, then backward groups) into positions of segments in their class.

    A group's segments follow one another; its weight gradients take the order of their backward groups.
    """
    at, position, base = pointer(s.at), pointer(s.position), pointer(p.base)
    group_start, group_segment = pointer(p.group_start), pointer(p.group_segment)
    place = 0
    for i in range(p.num_groups[0]):
        group = order[i]
        for k in range(group_start[group], group_start[group + 1]):
            segment = group_segment[k]
            at[place] = base[segment]
            position[segment] = place
            place += 1
    second = p.class_start[1]
    place = 0
    weight = 0
    for i in range(p.num_groups[0], p.num_groups[0] + p.num_groups[1]):
        group = order[i]
        for k in range(group_start[group], group_start[group + 1]):
            segment = group_segment[k]
            at[second + place] = base[segment]
            position[segment] = place
            place += 1
        for k in range(p.weight_start[group], p.weight_start[group + 1]):
            segment = p.weight_segment[k]
            at[p.class_start[2] + weight] = base[segment]
            position[segment] = weight
            weight += 1
