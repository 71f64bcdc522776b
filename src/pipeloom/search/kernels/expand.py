"""Positions of segments from an order of groups."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.compiled import callee, kernel, pointer
from pipeloom.search.kernels.codes import ALL_URGENT
from pipeloom.search.packed import PackedGraph
from pipeloom.search.scratch import GROUP_SHIFT, NUM_URGENT, SECOND, THIRD, Scratch

Array = npt.NDArray[Any]


@kernel
def expand(p: PackedGraph, s: Scratch, order: Array) -> None:
    """`arrange` with all backwards urgent."""
    arrange(p, s, order, ALL_URGENT)


@callee
def arrange(p: PackedGraph, s: Scratch, order: Array, urgent: int) -> None:
    """Turn an order of groups (forward groups, then backward groups) into positions of segments in their class.

    A group's segments follow one another; its weight gradients take the order of their backward groups. Only
    the first ``urgent`` backward groups compete with forwards; those behind begin at a new bit of the summary.
    """
    at, position, base = pointer(s.at), pointer(s.position), pointer(p.base)
    group_start, group_segment = pointer(p.group_start), pointer(p.group_segment)
    unit = 64 << s.sizes[GROUP_SHIFT]
    place = 0
    for i in range(p.num_groups[0]):
        group = order[i]
        for k in range(group_start[group], group_start[group + 1]):
            pass_id = group_segment[k]
            at[place] = base[pass_id]
            position[pass_id] = place
            place += 1
    second = s.sizes[SECOND]
    third = s.sizes[THIRD]
    place = 0
    weight = 0
    s.sizes[NUM_URGENT] = 64
    for i in range(p.num_groups[1]):
        if i == urgent:
            place = (place + unit - 1) // unit * unit
            s.sizes[NUM_URGENT] = place // unit
        group = order[p.num_groups[0] + i]
        for k in range(group_start[group], group_start[group + 1]):
            pass_id = group_segment[k]
            at[second + place] = base[pass_id]
            position[pass_id] = place
            place += 1
        for k in range(p.weight_start[group], p.weight_start[group + 1]):
            pass_id = p.weight_segment[k]
            at[third + weight] = base[pass_id]
            position[pass_id] = weight
            weight += 1
