"""How long messages are under way, from those whose receivers waited, and from those that were there in time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pipeloom.explain.traces.traced import TracedRun, Unit
from pipeloom.taskgraph import FORWARD


class Message(NamedTuple):
    """The input of a unit, on its way between ranks."""

    taken_ns: int
    """Until it was there, or was wanted, from when it could go: it had been made, and its receive was posted."""
    was_waited_for: bool
    """Otherwise it took no longer than ``taken_ns``."""
    since_made_ns: int
    """The same from when it had been made."""


Link = tuple[int, int, bool]
"""Source rank, target rank, and whether it carries forwards."""


def link_of(run: TracedRun, unit: Unit) -> Link:
    """The link that a unit's input takes."""
    forward = unit.kind == FORWARD
    source = unit.stage - 1 if forward else unit.stage + 1
    return run.stage_rank[source], run.stage_rank[unit.stage], forward


def link_medians(run: TracedRun, messages: Iterable[Mapping[Unit, Message]]) -> dict[Link, int]:
    """Median nanoseconds of the messages on every link."""
    found: dict[Link, list[Message]] = defaultdict(list)
    for each in messages:
        for unit, message in each.items():
            found[link_of(run, unit)].append(message)
    return {link: median_of(samples) for link, samples in found.items()}


def median_of(samples: Iterable[Message]) -> int:
    """Median of times of which some are known as upper bounds only (Kaplan and Meier 1958, turned left to right).

    Those that were waited for are the slow ones: their median alone would be too long.
    """
    ordered = sorted(samples)
    below = 1.0  # share of messages that are faster than those looked at so far
    for number in range(len(ordered) - 1, -1, -1):
        if ordered[number].was_waited_for:
            after = below * (1 - 1 / (number + 1))
            if after < 0.5:
                return ordered[number].taken_ns
            below = after
    # More than half were there in time: no longer than the shortest of them, as far as anybody knows.
    return ordered[0].taken_ns if ordered else 0
