"""Candidates of a pair from the strategies of its layers (`dip.txt` §5.3)."""

from __future__ import annotations

from typing import NamedTuple

from pipeloom.errors import InputError
from pipeloom.taskgraph import Candidate


class LayerOption(NamedTuple):
    """One strategy of one layer."""

    strategy: str
    forward_ns: int
    backward_ns: int
    activation_bytes: int


def pair_candidates(layers: list[list[LayerOption]], most: int = 10) -> tuple[Candidate, ...]:
    """Up to ``most`` candidates: the fastest, the leanest, and the fastest in each of ``most - 2`` equal ranges
    of bytes between the two.

    Every combination of the layers' strategies that no other beats in both time and bytes is kept, so each
    is the best of its range (a multiple-choice knapsack solved exactly). The fastest comes first.

    Parameters
    ----------
    layers : list of list of LayerOption
        The options of every layer, in order.
    most : int
        At least 2.
    """
    if most < 2:
        raise InputError("candidates", f"{most} is below 2", "the fastest and the leanest are always there")
    if not layers or not all(layers):
        raise InputError("layers", "is empty or has a layer without options")
    # (bytes, time) -> how it came about: the previous entry and the option.
    front: list[tuple[int, int, int, int, tuple[str, ...]]] = [(0, 0, 0, 0, ())]
    for options in layers:
        grown = [
            (
                held + o.activation_bytes,
                time + o.forward_ns + o.backward_ns,
                ahead + o.forward_ns,
                back + o.backward_ns,
                (*names, o.strategy),
            )
            for held, time, ahead, back, names in front
            for o in options
        ]
        front = []
        for entry in sorted(grown):
            if not front or entry[1] < front[-1][1]:
                front.append(entry)
    low, high = front[0][0], front[-1][0]
    picked = {front[0], front[-1]}
    for bucket in range(most - 2):
        top = low + (high - low) * (bucket + 1) // (most - 2)
        bottom = low + (high - low) * bucket // (most - 2)
        inside = [entry for entry in front if bottom < entry[0] <= top]
        if inside:
            picked.add(inside[-1])
    return tuple(
        Candidate(_name(names), ahead, back, 0, held, held, names)
        for held, _, ahead, back, names in sorted(picked, key=lambda entry: entry[1])
    )


def _name(names: tuple[str, ...]) -> str:
    return names[0] if len(set(names)) == 1 else "mixed"
