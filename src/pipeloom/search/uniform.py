"""Uniform settings of graphs with candidates: the same candidate for all pairs, as a start of the search.

The papers begin with the leanest strategies and let the finished order decide where there is room for faster ones
(`dip.txt` §5.2). An order made for lean pairs holds as many microbatches as fit, and leaves no room.
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
    """Uniform settings, fastest first, without those that another beats in time and bytes.

    Only settings that every pair has count, and where the host has a limit, those that keep off it.
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


def downhill(ladder: list[int], makespan: Callable[[int], float]) -> int | None:
    """Walk from the middle of the ladder to the setting whose neighbours are worse; None: none fits.

    Parameters
    ----------
    ladder : list of int
        Settings, fastest first.
    makespan : callable
        Of a setting, in nanoseconds; infinite where it does not fit. Called at most once for each.
    """
    known: dict[int, float] = {}

    def at(place: int) -> float:
        if not 0 <= place < len(ladder):
            return float("inf")
        if place not in known:
            known[place] = makespan(ladder[place])
        return known[place]

    here = len(ladder) // 2
    while at(here) == float("inf"):
        here += 1
        if here >= len(ladder):
            return None
    while True:
        step = min((here - 1, here + 1), key=at)
        if at(step) >= at(here):
            return ladder[here]
        here = step
