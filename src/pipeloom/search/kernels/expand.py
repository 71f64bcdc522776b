"""Positions of segments from an order of groups."""

from __future__ import annotations

from pipeloom.compiled import Array, callee, kernel, pointer
from pipeloom.search.kernels.codes import ALL_URGENT
from pipeloom.search.packed import PackedGraph
from pipeloom.search.scratch import Scratch


@kernel
def expand(packed: PackedGraph, scratch: Scratch, order: Array) -> None:
    """Run `arrange` with all backwards urgent."""
    arrange(packed, scratch, order, ALL_URGENT)


@callee
def arrange(packed: PackedGraph, scratch: Scratch, order: Array, urgent: int) -> None:
    """Turn an order of groups (forward groups, then backward groups) into positions of segments in their class.

    The segments of a group are consecutive. Weight gradients have the order of their backward groups. Only the first
    ``urgent`` backward groups compete with forwards. The others begin at a new bit of the summary.
    """
    at, position, base = pointer(scratch.at), pointer(scratch.position), pointer(packed.base)
    group_start, group_segment = pointer(packed.group_start), pointer(packed.group_segment)
    unit = 64 << scratch.group_shift
    place = 0
    for i in range(packed.num_groups[0]):
        group = order[i]
        for k in range(group_start[group], group_start[group + 1]):
            pass_id = group_segment[k]
            at[place] = base[pass_id]
            position[pass_id] = place
            place += 1
    second, third = scratch.second, scratch.third
    place = 0
    weight = 0
    scratch.urgent[0] = -1
    for i in range(packed.num_groups[1]):
        if i == urgent:
            place = (place + unit - 1) // unit * unit
            if place < 64 * unit:
                scratch.urgent[0] = (1 << (place // unit)) - 1
        group = order[packed.num_groups[0] + i]
        for k in range(group_start[group], group_start[group + 1]):
            pass_id = group_segment[k]
            at[second + place] = base[pass_id]
            position[pass_id] = place
            place += 1
        for k in range(packed.weight_start[group], packed.weight_start[group + 1]):
            pass_id = packed.weight_segment[k]
            at[third + weight] = base[pass_id]
            position[pass_id] = weight
            weight += 1
