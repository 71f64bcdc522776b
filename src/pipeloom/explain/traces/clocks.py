"""Alignment of clocks: a message cannot be received before its content was computed."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.errors import InputError
from pipeloom.explain.traces.traced import Iteration, input_of
from pipeloom.io.kineto import RankTrace

SLACK_NS = 20_000
"""Tolerated contradiction between times of one clock."""
_MOST_NS = 1_000_000_000


def clock_shifts(
    traces: Sequence[RankTrace], iterations: Sequence[Iteration], stage_rank: Sequence[int]
) -> tuple[int, ...]:
    """Return the nanoseconds to add to every rank's clock; all 0 if times already agree, as on one host.

    Messages in one direction bound the difference of two clocks from above, those in the other direction from below. If
    0 is not between the bounds, the shift is their middle, which assumes that both directions are equally fast. Raise
    `InputError` if no shift makes all messages causal, or clocks differ by more than a second and by more than an
    iteration.
    """
    bounds = _bounds(iterations, stage_rank)
    shifts = {0: 0}
    waiting = [0]
    while waiting:
        rank = waiting.pop()
        for (source, target), least in bounds.items():
            if source != rank or target in shifts:
                continue
            # Limits of the target's clock relative to the source's.
            lowest, highest = -least, bounds.get((target, source))
            if highest is not None and highest + 2 * SLACK_NS < lowest:
                raise InputError(
                    traces[target].source,
                    f"has messages to and from {traces[source].source} that would end before they began, by "
                    f"{(lowest - highest) / 1e6:.3f} ms on any clock",
                    "give traces of one run",
                )
            shifts[target] = shifts[rank] + _between(lowest, highest)
            waiting.append(target)
    found = tuple(shifts.get(rank, 0) for rank in range(len(traces)))
    longest = max(iteration.measured_ns for iteration in _rows(iterations))
    for trace, shift in zip(traces, found, strict=True):
        if abs(shift) > max(_MOST_NS, longest):
            raise InputError(
                trace.source,
                f"is {abs(shift) / 1e9:.3f} s {'behind' if shift > 0 else 'ahead of'} {traces[0].source}",
                "give traces of one run, from hosts whose clocks agree within a second",
            )
    return found


def _rows(iterations: Sequence[Iteration]) -> list[Iteration]:
    """Return each rank as an iteration of its own, so that durations do not depend on clocks."""
    return [
        Iteration(iteration.number, (rank,), (posted,))
        for iteration in iterations
        for rank, posted in zip(iteration.ranks, iteration.posted, strict=True)
    ]


def _between(lowest: int, highest: int | None) -> int:
    if lowest <= SLACK_NS and (highest is None or highest >= -SLACK_NS):
        return 0
    return lowest if highest is None else (lowest + highest) // 2


def _bounds(iterations: Sequence[Iteration], stage_rank: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return the least time from the end of a computation to the start of its consumer, by source and target rank."""
    least: dict[tuple[int, int], int] = {}
    for iteration in iterations:
        ends = {one.unit: one.end_ns for rank in iteration.ranks for one in rank}
        for target, rank in enumerate(iteration.ranks):
            for one in rank:
                source = input_of(one.unit, ends, len(stage_rank))
                if source is None or stage_rank[source.stage] == target:
                    continue
                key = (stage_rank[source.stage], target)
                taken = one.start_ns - ends[source]
                least[key] = min(taken, least.get(key, taken))
    return least
