"""DynaPipe's microbatches and order (Jiang et al., EuroSys 2024, arXiv 2311.10418).

Samples are sorted by length and cut into runs, each a microbatch, by dynamic programming. Microbatches of unlike times
run by a schedule of cycles, in each of which a rank does a backward and a forward at most, and puts forwards off while
memory is full. Which microbatches go in first is chosen among permutations of a few clusters.
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
"""Longest times of a microbatch that are tried."""


@dataclass(frozen=True, eq=False)
class StageLoads:
    """What samples, in the order in which they are cut, take on every stage.

    Attributes
    ----------
    seconds : array, shape (num_stages, num_samples)
    fixed_s : array, shape (num_stages,)
        Of every microbatch, whatever is in it.
    size_bytes : array, shape (num_stages, num_samples)
        Activations held.
    room_bytes : array, shape (num_stages,)
        That one microbatch may hold.
    """

    seconds: FloatArray
    fixed_s: FloatArray
    size_bytes: FloatArray
    room_bytes: FloatArray


def dynamic_microbatches(loads: StageLoads) -> tuple[tuple[int, int], ...]:
    """Cut samples in order into microbatches.

    With p stages, what is made small is ``(p - 1) max t + sum t`` for the times t of the microbatches on their slowest
    stages: the pipeline's fill by the longest, and the sum. For each of many longest times, dynamic programming finds
    the cut with the least sum.

    Returns
    -------
    tuple of (first, end)
        Of every microbatch, in order; ``end`` is not in it.

    Raises
    ------
    InfeasibleError
        A sample alone holds more than a microbatch may.
    """
    num_stages, count = loads.seconds.shape
    time = np.full((count, count + 1), -np.inf)
    fits = np.ones((count, count + 1), bool)
    for stage in range(num_stages):
        total = np.pad(np.cumsum(loads.seconds[stage]), (1, 0))
        held = np.pad(np.cumsum(loads.size_bytes[stage]), (1, 0))
        np.maximum(time, loads.fixed_s[stage] + total[None, :] - total[:-1, None], out=time)
        fits &= held[None, :] - held[:-1, None] <= loads.room_bytes[stage]
    time[~fits | np.tri(count, count + 1, dtype=bool)] = np.inf
    alone = time.diagonal(1)
    if not np.isfinite(alone).all():
        raise InfeasibleError(f"sample {int(alone.argmax())} alone holds more than a microbatch may")
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
    """The cut with the least sum of times of which none is above a limit; every sample alone is below it."""
    count = len(time)
    least = np.full(count + 1, np.inf)
    least[0] = 0.0
    before = np.zeros(count + 1, np.int64)
    begin = 0
    for end in range(1, count + 1):
        # Runs that end here are the longer the earlier they begin.
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
    graph: TaskGraph, injection: Sequence[int], room_bytes: IntArray | None = None, most_ahead: int | None = None
) -> Schedule:
    """Run microbatches in cycles: in each, every rank does one backward and then one forward, if they can be done.

    A pass can be done when the one before it was done in an earlier cycle; a forward is put off while its activations
    have no room, or too many microbatches are on the way.

    Parameters
    ----------
    graph : TaskGraph
        Under the strategies that it will run with; one stage on every rank.
    injection : sequence of int
        Microbatches in the order in which they go in.
    room_bytes : array, shape (num_ranks,), optional
        For activations; None: no limit.
    most_ahead : int, optional
        Microbatches whose forward a rank has done and whose backward it has not, at most.

    Raises
    ------
    InputError
        The graph has no labels, or a rank has more than one stage.
    InfeasibleError
        A microbatch has no room even alone.
    """
    chain = chain_of(graph)
    if len(set(chain.rank_of_stage)) < len(chain.rank_of_stage):
        raise InputError("layout", "has ranks of several stages, DynaPipe's schedule takes one")
    held = _held(graph, chain)
    room = [float("inf")] * len(held) if room_bytes is None else [int(room_bytes[r]) for r in chain.rank_of_stage]
    last, ahead = len(held) - 1, most_ahead or len(injection)
    # Places in the injection that have been done, by stage; passes of a cycle are seen by others in the next.
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
            if done[stage] < waits and done[stage] - back[stage] < ahead:
                microbatch = injection[done[stage]]
                if used[stage] + held[stage][microbatch] <= room[stage]:
                    order[rank] += chain.forward.get((stage, microbatch), [])
                    used[stage] += held[stage][microbatch]
                    done[stage] += 1
        if forward == tuple(done) and backward == tuple(back):
            raise InfeasibleError("DynaPipe: a microbatch has no room even alone")
    return as_schedule(graph, order, "memory-aware 1f1b")


def _held(graph: TaskGraph, chain: Chain) -> list[list[int]]:
    """Bytes of activations of every stage and microbatch."""
    stage_of = {rank: stage for stage, rank in enumerate(chain.rank_of_stage)}
    held = [[0] * chain.num_microbatches for _ in chain.rank_of_stage]
    kept = graph.backward_of >= 0
    homes, numbers = graph.rank[graph.forward_of], graph.microbatch[graph.forward_of]
    for pair in np.flatnonzero(kept).tolist():
        held[stage_of[int(homes[pair])]][int(numbers[pair])] += int(graph.activation_bytes[pair])
    return held
