"""Transfer times of messages, estimated from messages that were waited for and messages that arrived early."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pipeloom.explain.traces.traced import TracedRun, Unit
from pipeloom.taskgraph import FORWARD


class Message(NamedTuple):
    """Times of a message with the input of a unit."""

    taken_ns: int
    """Time until it arrived or was needed, since it was computed and its receive was posted."""
    was_waited_for: bool
    """False: ``taken_ns`` is an upper limit of the transfer time."""
    since_made_ns: int
    """The same, since it was computed."""


Link = tuple[int, int, bool]
"""Source rank, target rank, and whether it carries activations (else gradients)."""


def link_of(run: TracedRun, unit: Unit) -> Link:
    """Return the link of a unit's input."""
    forward = unit.kind == FORWARD
    source = unit.stage - 1 if forward else unit.stage + 1
    return run.stage_rank[source], run.stage_rank[unit.stage], forward


def link_medians(run: TracedRun, messages: Iterable[Mapping[Unit, Message]]) -> dict[Link, int]:
    """Return the median nanoseconds of messages on every link."""
    found: dict[Link, list[Message]] = defaultdict(list)
    for each in messages:
        for unit, message in each.items():
            found[link_of(run, unit)].append(message)
    return {link: median_of(samples) for link, samples in found.items()}


def median_of(samples: Iterable[Message]) -> int:
    """Return the median of times of which some are known as upper limits only (Kaplan and Meier 1958, reversed).

    Messages that were waited for are the slow ones, so their median alone would be too large.
    """
    ordered = sorted(samples)
    below = 1.0  # share of messages that are faster than those visited so far
    for number in range(len(ordered) - 1, -1, -1):
        if ordered[number].was_waited_for:
            after = below * (1 - 1 / (number + 1))
            if after < 0.5:
                return ordered[number].taken_ns
            below = after
    # More than half arrived early, so the shortest upper limit is the best estimate.
    return ordered[0].taken_ns if ordered else 0
