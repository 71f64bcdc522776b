"""Uniform settings of graphs with candidates: the same candidate for all pairs, as a start of the search.

DIP begins with the minimum-memory strategies and chooses faster ones where the final order leaves free memory
(DIP §5.2). However, an order for these strategies keeps as many microbatches in flight as fit, so it leaves no
memory free.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipeloom.taskgraph import TaskGraph
from pipeloom.taskgraph.candidates import (
    ACTIVATION_BYTES,
    BACKWARD_NS,
    FORWARD_NS,
    HOST_BYTES,
    WEIGHT_NS,
    candidate_cube,
)


def uniform_settings(graph: TaskGraph) -> list[int]:
    """Return the Pareto set of uniform settings in time and bytes, fastest first.

    Only settings that every pair has count. If the host has a limit, only settings without host bytes count.
    """
    if graph.candidates is None:
        return [0]
    cube, lengths = candidate_cube(graph.candidates)
    total = cube.sum(axis=0)
    time = total[:, FORWARD_NS] + total[:, BACKWARD_NS] + total[:, WEIGHT_NS]
    usable = np.flatnonzero((total[: lengths.min(), HOST_BYTES] == 0) | (graph.host_capacity_bytes is None)).tolist()
    totals = [(int(time[setting]), int(total[setting, ACTIVATION_BYTES]), setting) for setting in usable]
    out: list[int] = []
    least = float("inf")
    for _, held, setting in sorted(totals):
        if held < least:
            out.append(setting)
            least = held
    return out


def downhill(pareto: list[int], makespan: Callable[[int], float]) -> int | None:
    """Walk from the middle of the Pareto set, fastest first, to a setting with worse neighbors; None: none fits.

    ``makespan`` returns the makespan of a setting in ns, or infinity if it does not fit. It is called at most once for
    each setting.
    """
    known: dict[int, float] = {}

    def at(place: int) -> float:
        if not 0 <= place < len(pareto):
            return float("inf")
        if place not in known:
            known[place] = makespan(pareto[place])
        return known[place]

    here = len(pareto) // 2
    while at(here) == float("inf"):
        here += 1
        if here >= len(pareto):
            return None
    while True:
        step = min((here - 1, here + 1), key=at)
        if at(step) >= at(here):
            return pareto[here]
        here = step
