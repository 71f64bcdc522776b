"""DynaPipe's microbatches and order (Jiang et al., EuroSys 2024, arXiv 2311.10418).

Samples are sorted by length and cut into microbatches by dynamic programming. The schedule has cycles. In each cycle, a
rank runs at most one backward and one forward, and delays forwards while memory is full. The injection order of
microbatches is chosen among permutations of a few clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InfeasibleError, InputError
from pipeloom.search.stage_chain import Chain, as_schedule, chain_of
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule

FloatArray = npt.NDArray[np.float64]
_LIMITS = 48
"""Number of limits tried for the longest microbatch."""


@dataclass(frozen=True, eq=False)
class StageLoads:
    """Time and memory of samples on every stage, in the order of cutting.

    Attributes
    ----------
    seconds : array, shape (num_stages, num_samples)
        Time of forward and backward.
    fixed_s : array, shape (num_stages,)
        Fixed time of every microbatch.
    size_bytes : array, shape (num_stages, num_samples)
        Bytes of activations.
    free_bytes : array, shape (num_stages,)
        Bytes that one microbatch may hold.
    """

    seconds: FloatArray
    fixed_s: FloatArray
    size_bytes: FloatArray
    free_bytes: FloatArray


def dynamic_microbatches(loads: StageLoads) -> tuple[tuple[int, int], ...]:
    """Cut samples in order into microbatches; return the first and the end (exclusive) of each.

    With p stages, it minimizes ``(p - 1) max t + sum t`` for the times t of the microbatches on their slowest stages:
    the warm-up with the longest microbatch, and the sum. For each of many limits of the longest time, dynamic
    programming finds the cut with the least sum. Raise `InfeasibleError` if a single sample holds more than a
    microbatch may.
    """
    num_stages, count = loads.seconds.shape
    time = np.full((count, count + 1), -np.inf)
    fits = np.ones((count, count + 1), bool)
    for stage in range(num_stages):
        total = np.pad(np.cumsum(loads.seconds[stage]), (1, 0))
        held = np.pad(np.cumsum(loads.size_bytes[stage]), (1, 0))
        np.maximum(time, loads.fixed_s[stage] + total[None, :] - total[:-1, None], out=time)
        fits &= held[None, :] - held[:-1, None] <= loads.free_bytes[stage]
    time[~fits | np.tri(count, count + 1, dtype=bool)] = np.inf
    alone = time.diagonal(1)
    if not np.isfinite(alone).all():
        raise InfeasibleError(f"sample {int(alone.argmax())} alone exceeds the memory of a microbatch")
    limits = np.geomspace(alone.max(), max(time[np.isfinite(time)].max(), alone.max()), _LIMITS)
    best: tuple[float, list[int]] | None = None
    for limit in limits.tolist():
        if best is not None and (num_stages - 1) * limit >= best[0]:
            break
        least_s, cuts = _least_sum(time, limit * (1 + 1e-12))
        longest = max(time[a, b] for a, b in pairwise(cuts))
        cost = (num_stages - 1) * longest + least_s
        if best is None or cost < best[0]:
            best = cost, cuts
    assert best is not None
    return tuple(pairwise(best[1]))


def _least_sum(time: FloatArray, limit: float) -> tuple[float, list[int]]:
    """Return the cut with the least sum of times under a limit per microbatch; each single sample is within it."""
    count = len(time)
    least = np.full(count + 1, np.inf)
    least[0] = 0.0
    before = np.zeros(count + 1, np.int64)
    begin = 0
    for end in range(1, count + 1):
        # Microbatches that end here are longer if they begin earlier.
        while time[begin, end] > limit:
            begin += 1
        options = least[begin:end] + time[begin:end, end]
        at = int(options.argmin())
        least[end], before[end] = options[at], begin + at
    cuts = [count]
    while cuts[-1]:
        cuts.append(int(before[cuts[-1]]))
    return float(least[count]), cuts[::-1]


def memory_aware_1f1b(
    graph: TaskGraph, injection: Sequence[int], free_bytes: IntArray | None = None, chain: Chain | None = None
) -> Schedule:
    """Run microbatches in cycles. In each cycle, every rank runs one backward and then one forward, if possible.

    A pass can run if the previous pass ran in an earlier cycle. A forward is delayed while its activations do not fit.

    ``graph`` is under its chosen strategies, with one stage per rank. ``injection`` are the microbatches in order of
    injection. ``free_bytes`` is the memory of each rank for activations (None: no limit), and ``chain`` the graph's
    stages (None: they are read from its labels). Raise `InputError` if the graph has no labels or a rank several
    stages, and `InfeasibleError` if a microbatch does not fit even alone.
    """
    chain = chain or chain_of(graph)
    if len(set(chain.rank_of_stage)) < len(chain.rank_of_stage):
        raise InputError("layout", "has several stages on a rank", "DynaPipe's schedule needs one stage per rank")
    held = _held(graph, chain)
    free = [float("inf")] * len(held) if free_bytes is None else [int(free_bytes[r]) for r in chain.rank_of_stage]
    last = len(held) - 1
    # Number of finished forwards and backwards by stage. Other stages see passes of a cycle in the next cycle.
    done, back, used = [0] * (last + 1), [0] * (last + 1), [0] * (last + 1)
    order: list[list[int]] = [[] for _ in range(graph.num_ranks)]
    while back[0] < len(injection):
        forward, backward = tuple(done), tuple(back)
        for stage, rank in enumerate(chain.rank_of_stage):
            ready = forward[stage] if stage == last else backward[stage + 1]
            if back[stage] < ready:
                microbatch = injection[back[stage]]
                order[rank] += chain.backward.get((stage, microbatch), [])
                used[stage] -= held[stage][microbatch]
                back[stage] += 1
            waits = len(injection) if stage == 0 else forward[stage - 1]
            if done[stage] < waits:
                microbatch = injection[done[stage]]
                if used[stage] + held[stage][microbatch] <= free[stage]:
                    order[rank] += chain.forward.get((stage, microbatch), [])
                    used[stage] += held[stage][microbatch]
                    done[stage] += 1
        if forward == tuple(done) and backward == tuple(back):
            raise InfeasibleError("DynaPipe: a microbatch does not fit even alone")
    return as_schedule(graph, order, "memory-aware 1f1b")


def _held(graph: TaskGraph, chain: Chain) -> list[list[int]]:
    """Return the bytes of activations of every stage and microbatch."""
    held = np.zeros((graph.num_ranks, chain.num_microbatches), np.int64)
    kept = graph.backward_of >= 0
    forward = graph.forward_of[kept]
    np.add.at(held, (graph.rank[forward], graph.microbatch[forward]), graph.activation_bytes[kept])
    found: list[list[int]] = held[list(chain.rank_of_stage)].tolist()
    return found
