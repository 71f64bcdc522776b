"""Timetables: the starts of every chunk in a steady state without idle time, as the keys of a rule.

In a steady state, each rank repeats its tasks once per period, the work of the fullest rank. Any order of the tasks of
a rank is feasible if microbatches wait long enough between two chunks. The total time of a microbatch should be short,
because it determines how many microbatches are in flight. With two chunks per rank, down the ranks and up again, all
waits are between adjacent ranks. Orders and phases with minimum waiting are thus found rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import numpy as np
import numpy.typing as npt

from pipeloom.layout.cooptimize.cuts import folded
from pipeloom.layout.cooptimize.layer_chain import LayerChain, PartitionPlacement, chunk_costs, rank_work_ns
from pipeloom.layout.cooptimize.params import TimetableParams
from pipeloom.layout.cooptimize.rules import PriorityRule
from pipeloom.taskgraph import IntArray

_ORDERS = np.array([(0, *rest) for rest in permutations((1, 2, 3))])
"""Orders of the tasks of a rank in a period: F of its first chunk, F and B of its second, B of its first."""

Times = npt.NDArray[np.float64]


def folded_starts(
    chain: LayerChain, stride: int, params: TimetableParams
) -> Iterator[tuple[PartitionPlacement, PriorityRule]]:
    """Yield the best placements with two chunks per rank, down and up again, with their timetables.

    ``stride`` is that of the kernels (`pipeloom.layout.cooptimize.evaluate.arrays_of`).
    """
    for ends in params.ends:
        yield from _under_timetable(chain, folded(chain, ends), stride, params)


def _under_timetable(
    chain: LayerChain, placement: PartitionPlacement, stride: int, params: TimetableParams
) -> Iterator[tuple[PartitionPlacement, PriorityRule]]:
    num = placement.num_chunks
    starts, period = steady_starts(chain, placement)
    hops = np.arange(2 * num).reshape(2, num)
    hops[1] = hops[1, ::-1]
    weights = np.full(num, stride * chain.num_microbatches * 4, dtype=np.int64)
    for buffer in params.buffers:
        # Whole periods, so that tasks keep their places within a period.
        planned = starts / period + np.floor(hops * buffer)
        keys = np.concatenate([(planned * stride).astype(np.int64), weights[None]])
        ahead = planned[1] - planned[0] + chunk_costs(chain, placement).backward_ns / period
        for wait in params.waits:
            waits = np.full((3, num), int(wait * stride), np.int64)
            yield placement, PriorityRule(keys, waits)
            yield placement, PriorityRule(keys, waits, limits=fitting_limits(chain, placement, ahead * params.ahead))


def fitting_limits(chain: LayerChain, placement: PartitionPlacement, wanted: Times) -> IntArray:
    """Return limits on microbatches in flight, shape (num_chunks,), at least 1. Limited memory of a rank lowers
    them.
    """
    costs, home = chunk_costs(chain, placement), np.array(placement.ranks)
    held = np.maximum(costs.activation_bytes, costs.gradient_bytes * (costs.weight_ns > 0))
    free = chain.headroom_bytes.astype(np.float64)
    np.subtract.at(free, home, costs.static_bytes)
    use = np.zeros(chain.num_ranks)
    np.add.at(use, home, wanted * held)
    share = np.minimum(1.0, np.maximum(free, 0.0) / np.maximum(use, 1.0))
    limits: IntArray = np.maximum(1, np.floor(wanted * share[home])).astype(np.int64)
    return limits


def steady_starts(chain: LayerChain, placement: PartitionPlacement) -> tuple[Times, int]:
    """Return the starts of F and B or I of one microbatch in ns, shape (2, num_chunks), and the period.

    The placement goes down the ranks with one chunk on each, and up again with at most one chunk on each.
    """
    costs, p = chunk_costs(chain, placement), chain.num_ranks
    chunks = np.full((p, 2), -1)
    for c, rank in enumerate(placement.ranks):
        chunks[rank, int(chunks[rank, 0] >= 0)] = c
    both = np.stack([costs.forward_ns, costs.backward_ns]).astype(np.float64)
    period = max(1, int(rank_work_ns(chain, placement).max()))
    second = chunks[:, 1] >= 0
    length = np.zeros((p, 4))
    length[:, 0], length[:, 3] = both[0, chunks[:, 0]], both[1, chunks[:, 0]]
    length[second, 1], length[second, 2] = both[0, chunks[second, 1]], both[1, chunks[second, 1]]
    # Offset of every task in its period, for every order: the total length of the tasks before it.
    place = np.zeros((p, len(_ORDERS), 4))
    for i, order in enumerate(_ORDERS):
        place[:, i, order] = length[:, order].cumsum(axis=1) - length[:, order]
    order, phase = _least_waiting(length, place, second, period, float(chain.delay_ns))
    planned = np.zeros((2, len(placement.ranks)))
    now = 0.0
    for kind, along in ((0, range(len(placement.ranks))), (1, range(len(placement.ranks) - 1, -1, -1))):
        before = placement.ranks[along[0]]
        for c in along:
            rank = placement.ranks[c]
            now += chain.delay_ns * (rank != before)
            before = rank
            task = 3 * kind if chunks[rank, 0] == c else 1 + kind
            now += (phase[rank] + place[rank, order[rank], task] - now) % period
            planned[kind, c] = now
            now += both[kind, c]
    return planned, period


def _least_waiting(
    length: Times, place: Times, second: npt.NDArray[np.bool_], period: int, delay: float
) -> tuple[IntArray, Times]:
    """Return the order and phase of every rank that minimize the total waiting of a microbatch between adjacent
    ranks.
    """
    num, p = len(_ORDERS), len(length)
    waited = (place[0, :, 2] - place[0, :, 1] - length[0, 1]) % period * second[0]
    came, turned = np.zeros((p, num), np.int64), np.zeros((p, num))
    for r in range(1, p):
        old, new, a, b = place[r - 1][:, None], place[r][None], length[r - 1], length[r]
        # Phase shifts with which one of the four messages is used without waiting, shape (orders, orders, 4).
        shift = np.stack(
            np.broadcast_arrays(
                old[..., 0] + a[0] + delay - new[..., 0],
                old[..., 1] - delay - new[..., 1] - b[1],
                old[..., 2] + a[2] + delay - new[..., 2],
                old[..., 3] - delay - new[..., 3] - b[3],
            ),
            axis=-1,
        )
        # Each wait is the distance of its shift from the chosen shift; two of them are negated.
        gap = (shift[..., :, None] - shift[..., None, :]) * np.array([1, -1, 1, -1])
        counts = np.array([1, second[r], second[r], 1])
        cost = waited[:, None, None] + (gap % period * counts).sum(axis=-1)
        best = cost.transpose(1, 0, 2).reshape(num, -1).argmin(axis=1)
        came[r] = best // 4
        turned[r] = shift[came[r], np.arange(num), best % 4]
        waited = cost[came[r], np.arange(num), best % 4]
    order, phase = np.zeros(p, np.int64), np.zeros(p)
    order[-1] = int(waited.argmin())
    for r in range(p - 1, 0, -1):
        order[r - 1] = came[r, order[r]]
        phase[r] = turned[r, order[r]]
    return order, phase.cumsum()
