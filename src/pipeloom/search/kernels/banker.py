"""Banker's admission: a task may take memory only if every component that has begun can still finish."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.compiled import Array, inlined, int64, pointer
from pipeloom.search.packed import PackedGraph


class Bank(NamedTuple):
    """Arrays that the banker reads and writes; see `make_bank`. Kernels read `pointers` to them.

    ``free`` to ``ready`` belong to one thread. ``ready`` is also written by list scheduling: the time at which a task
    became ready, by cell; -1 once it is scheduled. The others are arrays of `PackedGraph`: ``size`` is its ``bytes``,
    and ``component_of`` its ``component``.
    """

    free: Array
    available: Array
    demand: Array
    allocated: Array
    component_left: Array
    active: Array
    ready: Array
    size: Array
    component_of: Array
    component_size: Array
    scan_start: Array
    scan_cell: Array
    num_ranks: int


def make_bank(packed: PackedGraph) -> Bank:
    """Return the bank of one thread for one problem."""
    num_components, num_ranks = packed.demand.shape

    def ints(*shape: int) -> Array:
        return np.zeros(shape, np.int64)

    return Bank(
        free=ints(num_ranks),
        available=ints(num_ranks),
        demand=ints(num_components, num_ranks),
        allocated=ints(num_components, num_ranks),
        component_left=ints(num_components),
        active=ints(num_components),
        ready=ints(len(packed.number)),
        size=packed.bytes,
        component_of=packed.component,
        component_size=packed.component_size,
        scan_start=packed.scan_start,
        scan_cell=packed.scan_cell,
        num_ranks=num_ranks,
    )


@inlined
def open_bank(bank: Bank, packed: PackedGraph, by_component: bool) -> None:
    """Reset the bank: no task has run and, if the rule is ``by_component``, no component holds memory."""
    full = pointer(packed.demand)
    for cell in range(len(packed.number)):
        bank.ready[cell] = 0
    for rank in range(bank.num_ranks):
        bank.free[rank] = packed.capacity[rank]
    num_components = len(packed.component_size) if by_component else 0
    for component in range(num_components):
        bank.component_left[component] = bank.component_size[component]
        for i in range(component * bank.num_ranks, (component + 1) * bank.num_ranks):
            bank.demand[i] = full[i]
            bank.allocated[i] = 0


@inlined
def can_finish(bank: Bank, cell: int, rank: int, num_active: int) -> bool:
    """Return whether every started component can still finish after a task that takes memory.

    The component of the task must be able to finish with the free memory, either at once or after other components have
    finished and freed their memory. The remaining components are then as they were before the task, with more free
    memory, so they need no further check. A negative number in ``active`` marks a component that has finished here.
    """
    free, available, demand, allocated, active = bank.free, bank.available, bank.demand, bank.allocated, bank.active
    num_ranks = bank.num_ranks
    component = int64(bank.component_of[cell])
    net = bank.size[2 * cell + 1]
    first = component * num_ranks
    row = first + rank
    after = demand[row] - net
    if bank.scan_start[row + 1] > bank.scan_start[row]:
        after = scan_demand(bank, cell, row)
    short = after > free[rank] - net
    for r in range(num_ranks):
        short |= (r != rank) & (demand[first + r] > free[r])
    if not short:
        return True
    for r in range(num_ranks):
        available[r] = free[r]
    available[rank] -= net
    moved = True
    while moved and short:
        moved = False
        for i in range(num_active):
            other = active[i]
            if other < 0 or other == component:
                continue
            fits = True
            theirs = other * num_ranks
            for r in range(num_ranks):
                fits &= demand[theirs + r] <= available[r]
            if fits:
                active[i] = -1 - other
                moved = True
                short = False
                for r in range(num_ranks):
                    available[r] += allocated[theirs + r]
                    short |= (r != rank) & (demand[first + r] > available[r])
                short |= after > available[rank]
                if not short:
                    break
    for i in range(num_active):
        if active[i] < 0:
            active[i] = -1 - active[i]
    return not short


@inlined
def scan_demand(bank: Bank, cell: int, row: int) -> int:
    """Return the peak of a component on a rank after a task, in bytes above those it holds, in reference order."""
    allocated = 0
    most = 0
    for i in range(bank.scan_start[row], bank.scan_start[row + 1]):
        other = bank.scan_cell[i]
        if other == cell or bank.ready[other] < 0:
            continue
        most = max(most, allocated + bank.size[2 * other])
        allocated += bank.size[2 * other + 1]
    return most


@inlined
def grant(bank: Bank, cell: int, rank: int, num_active: int) -> int:
    """Record the memory change of a task; return the number of components in progress."""
    active = bank.active
    component = int64(bank.component_of[cell])
    net = bank.size[2 * cell + 1]
    row = component * bank.num_ranks + rank
    left = bank.component_left[component]
    if left == bank.component_size[component]:
        active[num_active] = component
        num_active += 1
    bank.component_left[component] = left - 1
    bank.allocated[row] += net
    if bank.scan_start[row + 1] > bank.scan_start[row]:
        bank.demand[row] = scan_demand(bank, cell, row)
    elif net > 0:
        bank.demand[row] -= net
    if left == 1:
        for i in range(num_active):
            if active[i] == component:
                num_active -= 1
                active[i] = active[num_active]
                break
    return num_active
