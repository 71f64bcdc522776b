"""Mixtures: a chunk's layers under strategies of their own, and which of them are worth offering (`dip.txt` §5.3).

One maker for measured and emulated costs: what a layer may do goes in, and out come the mixtures that no other beats in
time and bytes, solved exactly (a multiple-choice knapsack): layers that have the same options differ by their place
alone, so a mixture is how many of them do what.

Copies to the host and back run beside computation, on a lane for each direction. A chunk's forward takes no less than
its copies out, its backward no less than its copies in; where either is longer, the rest is in the pair's time. So
copies of some layers hide under the computation of all layers of their chunk, and never under that of other chunks:
whatever the order of passes, each brings the lane no more than it can do meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

FORWARD, BACKWARD, HELD, HOST, OUT, IN = range(6)
"""Columns of `Mixtures.amounts`, as the numbers of a `LayerOption`."""
MOST_PARTS = 12
"""More equal layers than this go over to another strategy several at a time."""
LANE_PRICES = (0.0, 0.5, 1.0)
"""Part of a copy's time that may end up in the pair's: what may be best under one of these stays, until it is known."""


class LayerOption(NamedTuple):
    """One strategy of one layer: times in any unit, and bytes."""

    strategy: str
    forward: float
    backward: float
    activation_bytes: float
    host_bytes: float = 0
    copy_out: float = 0.0
    """Time that copying to the host takes on its lane, where it may run beside computation."""
    copy_in: float = 0.0


class Mixtures(NamedTuple):
    """Mixtures of a chunk's layers, among them all that no other beats in time and bytes.

    Attributes
    ----------
    amounts : array, shape (num_mixtures, 6)
        Sums over the layers.
    times : array, shape (num_mixtures,)
        Of a forward and a backward, with what copies add.
    groups : tuple of (options, places)
        Equal layers: what they may do, and their places in the chunk.
    lean_first : per group a list of int
        What they may do in the order in which it is given to them: the leanest first, what offloads last.
    counts : per group an array, shape (num_mixtures, num_options)
        How many of its layers do what.
    base : array, shape (6,)
        Amounts where every layer does what comes first among its options.
    front, free_front : array
        Mixtures that no other beats, leanest first; and those that keep off the host, which no other of these beats.
    """

    amounts: FloatArray
    times: FloatArray
    groups: tuple[tuple[tuple[LayerOption, ...], list[int]], ...]
    lean_first: tuple[list[int], ...]
    counts: tuple[IntArray, ...]
    base: FloatArray
    front: IntArray
    free_front: IntArray

    def layers(self, number: int) -> tuple[str, ...]:
        """Strategy of every layer of one mixture: equal ones side by side, the leanest first, the offloaded last."""
        found = [""] * sum(len(places) for _, places in self.groups)
        for (options, places), order, counts in zip(self.groups, self.lean_first, self.counts, strict=True):
            names: list[str] = []
            each = counts[number].tolist()
            for i in order:
                names += [options[i].strategy] * each[i]
            for place, name in zip(places, names, strict=True):
                found[place] = name
        return tuple(found)


def mix(layers: Sequence[Sequence[LayerOption]]) -> Mixtures:
    """Find the mixtures that are worth offering.

    Parameters
    ----------
    layers : sequence of sequence of LayerOption
        What each layer may do, in order; equal layers have equal options.

    Raises
    ------
    InputError
        No layers, or one without options.
    """
    if not layers or not all(layers):
        raise InputError("layers", "is empty or has a layer without options")
    groups: dict[tuple[LayerOption, ...], list[int]] = {}
    for place, options in enumerate(layers):
        groups.setdefault(tuple(options), []).append(place)
    amounts: FloatArray = _NOTHING
    base: FloatArray = _NOTHING[0]
    picked: list[IntArray] = []
    for options, places in groups.items():
        counts = _shares(len(places), len(options))
        table = np.array([option[1:] for option in options], np.float64)
        mine, base = counts.astype(np.float64) @ table, base + len(places) * table[0]
        if not picked:
            amounts = mine
            picked = [counts]
            continue
        best = _promising(amounts)
        amounts = (amounts[best, None, :] + mine).reshape(-1, len(_NOTHING[0]))
        picked = [np.repeat(rows[best], len(counts), axis=0) for rows in picked] + [np.tile(counts, (len(best), 1))]
    times = pass_times(amounts).sum(axis=1)
    free = _front(amounts, times, amounts[:, HOST] == 0)
    front = _front(amounts, times) if amounts[:, HOST].any() else free
    lean_first = tuple(
        sorted(range(len(options)), key=lambda i: (options[i].host_bytes > 0, options[i].activation_bytes))
        for options in groups
    )
    return Mixtures(amounts, times, tuple(groups.items()), lean_first, tuple(picked), base, front, free)


_NOTHING: FloatArray = np.zeros((1, 6))


def pass_times(amounts: FloatArray) -> FloatArray:
    """Times of the forward and of the backward, shape (num_mixtures, 2): no shorter than what their lanes copy."""
    found: FloatArray = np.maximum(amounts[:, : BACKWARD + 1], amounts[:, OUT:])
    return found


def _promising(amounts: FloatArray) -> IntArray:
    """Rows that may be part of a best mixture, whatever the other layers leave of the lanes."""
    time, copied = amounts[:, FORWARD] + amounts[:, BACKWARD], amounts[:, OUT] + amounts[:, IN]
    fronts = [_front(amounts, time, amounts[:, HOST] == 0)]
    if copied.any():
        fronts += [_front(amounts, time + price * copied) for price in LANE_PRICES]
    return np.unique(np.concatenate(fronts))


def _front(amounts: FloatArray, time: FloatArray, among: npt.NDArray[np.bool_] | None = None) -> IntArray:
    """Rows that no other beats in bytes and time, leanest first; among some of them alone."""
    held = amounts[:, HELD]
    order: IntArray = np.lexsort((time, held))
    if among is not None:
        order = order[among[order]]
    rising = time[order]
    keep = np.ones(len(order), np.bool_)
    keep[1:] = rising[1:] < np.minimum.accumulate(rising)[:-1]
    return order[keep]


@cache
def _shares(num_layers: int, num_options: int) -> IntArray:
    """All ways to deal equal layers to options, shape (num_ways, num_options); large numbers several at a time."""
    parts = min(num_layers, MOST_PARTS)
    ways = [(parts,)] if num_options == 1 else list(_splits(parts, num_options))
    ends = np.cumsum(np.array(ways, np.int64), axis=1)
    bounds = (ends * num_layers + parts // 2) // parts
    found: IntArray = np.diff(bounds, axis=1, prepend=0)
    return found


def _splits(total: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(total,)]
    return [(first, *rest) for first in range(total, -1, -1) for rest in _splits(total - first, parts - 1)]


def ranges(found: Mixtures, front: IntArray, most: int) -> list[int]:
    """The fastest of a front, the leanest, and the fastest in each of ``most - 2`` equal ranges of bytes between.

    Raises
    ------
    InputError
        ``most`` is below 2.
    """
    if most < 2:
        raise InputError("candidates", f"{most} is below 2", "the fastest and the leanest are always there")
    held = found.amounts[front, HELD]
    low, high = int(held[0]), int(held[-1])
    places = {0, len(front) - 1}
    for bucket in range(most - 2):
        top = low + (high - low) * (bucket + 1) // (most - 2)
        bottom = low + (high - low) * bucket // (most - 2)
        place = int(np.searchsorted(held, top, "right")) - 1
        if held[place] > bottom:
            places.add(place)
    chosen: list[int] = front[sorted(places, reverse=True)].tolist()
    return chosen


def ladder(found: Mixtures, num_free: int, num_offloading: int) -> list[int]:
    """So many mixtures in even steps of bytes, the fastest within each: the same step on every chunk is one setting.

    Returns
    -------
    list of int
        ``num_free`` that keep off the host, from the fastest to the leanest; then ``num_offloading`` of all, if any
        offloads. Chunks that have fewer repeat some.
    """
    free = _steps(found, found.free_front, _parts(num_free))
    if found.front is found.free_front:
        return free
    return free + _steps(found, found.front, _parts(num_offloading + 1)[1:])


@cache
def _parts(number: int) -> FloatArray:
    return np.linspace(1.0, 0.0, number)


def _steps(found: Mixtures, front: IntArray, parts: FloatArray) -> list[int]:
    """Per part of the way from the leanest of a front to the fastest off the host: the most that holds no more."""
    held = found.amounts[front, HELD]
    top = found.amounts[found.free_front[-1], HELD]
    chosen: list[int] = front[np.searchsorted(held, held[0] + parts * (top - held[0]), "right") - 1].tolist()
    return chosen
