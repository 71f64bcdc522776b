"""Lower bounds from memory: bytes times the time that they are held, divided by the memory of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeloom.lazy import lazy_module
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph
from pipeloom.timeline.bounds.bound import Bound, Facts
from pipeloom.timeline.options import Options, without_host_bytes

if TYPE_CHECKING:
    from pipeloom.timeline import residence
else:
    residence = lazy_module("pipeloom.timeline.residence")

FloatArray = npt.NDArray[np.float64]


class Memory(Bound):
    """On some rank, bytes times the least time that they are held, divided by its free memory.

    With candidates, it is weighed against work, since no candidate is both the smallest and the fastest (`_weighed`).
    If offloading stages bytes, it is the smaller of two bounds: with offloading and less free memory, and without
    offloading.
    """

    name = "memory"

    @classmethod
    def ns(cls, facts: Facts) -> int:
        """Return the largest over all ranks."""
        graph, free_bytes = facts.graph, facts.graph.most_headroom_bytes
        if free_bytes is None:
            return 0
        # In any schedule, the pairs of a rank either hold nothing on the host, or its memory is reduced by staging.
        cases = [(facts.options, free_bytes)]
        if graph.staging_bytes is not None:
            cases = [(facts.options, free_bytes - graph.staging_bytes), (without_host_bytes(facts.options), free_bytes)]
        held = held_byte_ns(graph, [options for options, _ in cases], facts.least)
        totals = [options.total_ns for options, _ in cases]
        found = [0]
        for rank in facts.ranks:
            mine, (first, last), ends = facts.pair_rank == rank, facts.first_and_last[rank], facts.ends[rank]
            # A case with negative free memory has no schedule.
            under = [
                _weighed(total_ns[mine], byte_ns[mine], int(left[rank]), first, last, ends)
                for (_, left), total_ns, byte_ns in zip(cases, totals, held, strict=True)
                if left[rank] >= 0
            ]
            found.append(min(under, default=0))
        return max(found)


def held_byte_ns(graph: TaskGraph, several: Sequence[Options], least: IntArray) -> list[FloatArray]:
    """Return bytes times the least time that they are held, by pair and candidate, for each of ``several`` tables.

    ``least`` has the least duration of every task. The result is in float since such products exceed 64-bit integers.
    """
    topological = residence.quick_topological_order(graph)
    middle = residence.middles(graph, least, topological)
    found: list[FloatArray] = []
    for options in several:
        held_ns = (options.forward_ns + options.backward_ns + middle[:, None]).astype(np.float64)
        held: FloatArray = options.activation_bytes * held_ns
        if options.forward_ns.shape[1] == 1:
            _add_waiting(graph, options, least, topological, held)
        gradient = options.weight_gradient_bytes * options.weight_ns.astype(np.float64)
        found.append(held + np.where((graph.weight_of != NO_TASK)[:, None], gradient, 0.0))
    return found


def _add_waiting(graph: TaskGraph, options: Options, least: IntArray, topological: IntArray, held: FloatArray) -> None:
    """Add the time that sub-microbatches of one microbatch wait for each other, if that increases the sum.

    Let the pairs i of one module, microbatch and rank have bytes a_i, and all pass through tasks J and K
    (`meetings`). Their forwards run one by one and end at least h before J begins. Going back from there, the weighted
    sum of their starts is at least that of a single machine, which Smith's rule (shortest f_i / a_i first) minimizes:
    sum a_i (start J - start F_i) >= h sum a_i + Smith(f, a). The same holds for the backwards after K. Between J and K
    all bytes are held.
    """
    pairs = np.flatnonzero(graph.backward_of != NO_TASK)
    forward = graph.forward_of[pairs]
    keys = (graph.rank[forward], graph.module[forward], graph.microbatch[forward])
    order = np.lexsort(keys)
    changes = np.zeros(len(order), bool)
    for key in keys:
        changes[1:] |= np.diff(key[order]) != 0
    groups = [group for group in np.split(pairs[order], np.flatnonzero(changes)) if len(group) > 1]
    if not groups:
        return
    found = residence.meetings(graph, least, topological, groups)
    lengths = np.array([len(group) for group in groups])
    # Process all groups of one length at once, one per row.
    for length in np.unique(lengths[found[:, 1] >= 0]).tolist():
        chosen = np.flatnonzero((lengths == length) & (found[:, 1] >= 0))
        group = np.stack([groups[i] for i in chosen.tolist()])
        size = options.activation_bytes[group, 0].astype(np.float64)
        both = found[chosen].sum(axis=1) * size.sum(axis=1)
        both += _smith(options.forward_ns[group, 0], size) + _smith(options.backward_ns[group, 0], size)
        missing = both - held[group, 0].sum(axis=1)
        held[group, 0] += np.maximum(missing, 0.0)[:, None] / length


def _smith(length: IntArray, weight: FloatArray) -> FloatArray:
    """Return the least weighted sum of completion times on one machine, for each row."""
    order = np.argsort(length / np.maximum(weight, 1e-9), axis=1, kind="stable")
    ends = np.cumsum(np.take_along_axis(length, order, axis=1), axis=1)
    least: FloatArray = (ends * np.take_along_axis(weight, order, axis=1)).sum(axis=1)
    return least


def _weighed(total: IntArray, held: FloatArray, free: int, first: int, last: int, ends: int) -> int:
    """Return the best weighted mean of the bounds by work and by memory.

    For any choice of candidates, makespan >= ends + work and makespan >= first + held / free + last, since nothing is
    held before the first task or after the last one. For any weight, the mean of both is a bound, and its minimum over
    all choices is found pair by pair. Without free memory nothing may be held, so memory gives no bound.
    """
    if free == 0:
        return 0
    best = 0.0
    weights = (0.0,) if total.shape[1] == 1 else np.linspace(0.0, 1.0, 21)
    # One row per candidate: numpy takes ten times as long for the minimum over a few columns.
    work, filled = np.ascontiguousarray(total.T), np.ascontiguousarray(held.T) / free
    for weight in weights:
        mixed = weight * work + (1 - weight) * filled
        best = max(best, weight * ends + (1 - weight) * (first + last) + float(mixed.min(axis=0).sum()))
    # A relative 1e-12 covers float rounding. Times are integers, so the bound is rounded up.
    return int(np.ceil(best * (1 - 1e-12)))
