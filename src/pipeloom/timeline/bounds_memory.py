"""Lower bounds from memory: bytes times the time that they are held, against what a rank can hold in all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeloom.lazy import lazy_module
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph
from pipeloom.timeline.options import Options

if TYPE_CHECKING:
    from pipeloom.timeline import residence
else:
    residence = lazy_module("pipeloom.timeline.residence")

FloatArray = npt.NDArray[np.float64]


def held_byte_ns(graph: TaskGraph, several: Sequence[Options], least: IntArray) -> list[FloatArray]:
    """Bytes times the least nanoseconds they are held, by pair and candidate, for each of several tables of candidates.

    Products of large byte counts and times leave 64-bit integers behind, hence floats.

    Parameters
    ----------
    least : array, shape (num_tasks,)
        Least duration of every task.
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
    """Raise what the parts of a microbatch hold by the time that they wait for each other, where that is more.

    Let the pairs i of one module, microbatch and rank have bytes a_i, and all pass through tasks J and K
    (`meetings`). Their forwards run one by one and end at least h before J begins, so going back from there, the
    weighted sum of their starts is at least that of a single machine, which Smith's rule (shortest f_i / a_i
    first) makes least: sum a_i (start J - start F_i) >= h sum a_i + Smith(f, a). So it is with the backwards
    after K, and between J and K all bytes are held.
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
    # All groups of one length at once: a row each.
    for length in np.unique(lengths[found[:, 1] >= 0]).tolist():
        chosen = np.flatnonzero((lengths == length) & (found[:, 1] >= 0))
        group = np.stack([groups[i] for i in chosen.tolist()])
        size = options.activation_bytes[group, 0].astype(np.float64)
        both = found[chosen].sum(axis=1) * size.sum(axis=1)
        both += _smith(options.forward_ns[group, 0], size) + _smith(options.backward_ns[group, 0], size)
        missing = both - held[group, 0].sum(axis=1)
        held[group, 0] += np.maximum(missing, 0.0)[:, None] / length


def _smith(length: IntArray, weight: FloatArray) -> FloatArray:
    """Least weighted sum of completion times of one machine's jobs, a row each."""
    order = np.argsort(length / np.maximum(weight, 1e-9), axis=1, kind="stable")
    ends = np.cumsum(np.take_along_axis(length, order, axis=1), axis=1)
    least: FloatArray = (ends * np.take_along_axis(weight, order, axis=1)).sum(axis=1)
    return least


def memory_bound(total: IntArray, held: FloatArray, room: int, first: int, last: int, ends: int) -> int:
    """Weigh work against memory.

    For any choice, makespan >= ends + work and makespan >= first + held / room + last (nothing is held before
    the first task or after the last one; without room nothing may be held, which says nothing of time). So for any
    weight, the mean of the two is a bound, and the least over the choices of each pair is found pair by pair.
    """
    if room == 0:
        return 0
    best = 0.0
    weights = (0.0,) if total.shape[1] == 1 else np.linspace(0.0, 1.0, 21)
    # A row a candidate: the least over few columns, pair by pair, takes numpy ten times as long.
    work, filled = np.ascontiguousarray(total.T), np.ascontiguousarray(held.T) / room
    for weight in weights:
        mixed = weight * work + (1 - weight) * filled
        best = max(best, weight * ends + (1 - weight) * (first + last) + float(mixed.min(axis=0).sum()))
    # A relative 1e-12 covers the rounding of floats; times are whole, so the rest is rounded up.
    return int(np.ceil(best * (1 - 1e-12)))
