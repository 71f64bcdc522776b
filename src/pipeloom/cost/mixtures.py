"""Mixtures: a different memory strategy for each layer of a chunk (DIP §5.3).

Measured and emulated costs both use this module. The input is the options of each layer, and the output is the Pareto
set of mixtures in time and bytes. It is exact (a multiple-choice knapsack). Layers with equal options differ only by
their position, so a mixture is how many of them use each option.

Copies to and from the host overlap with computation, on one lane per direction. A chunk's forward takes at least as
long as its copies out, and its backward at least as long as its copies in. If the copies are longer, the rest adds to
the pair's time. So copies of some layers hide behind the computation of all layers of their chunk, and never behind
that of other chunks. In any order of passes, each pass brings its lane no more copies than the lane can do during the
pass.
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
"""Columns of `Mixtures.amounts`, in the order of the numbers of a `LayerOption`."""
MOST_PARTS = 12
"""If there are more equal layers than this, several of them change their strategy together."""
LANE_PRICES = (0.0, 0.5, 1.0)
"""Shares of a copy's time that may add to the pair's time. An option that can be best for one of these is kept until
the share is known."""


class LayerOption(NamedTuple):
    """One strategy of one layer: times in any unit, and bytes."""

    strategy: str
    forward: float
    backward: float
    activation_bytes: float
    host_bytes: float = 0
    copy_out: float = 0.0
    """Time of the copy to the host on its lane, which may overlap with computation."""
    copy_in: float = 0.0


class Mixtures(NamedTuple):
    """Mixtures of a chunk's layers, which include the Pareto set in time and bytes."""

    amounts: FloatArray
    """Sums over the layers, shape (num_mixtures, 6)."""
    times: FloatArray
    """Time of a forward and a backward, with the part of copies that does not overlap, shape (num_mixtures,)."""
    groups: tuple[tuple[tuple[LayerOption, ...], list[int]], ...]
    """Groups of equal layers: their options, and their positions in the chunk."""
    layer_order: tuple[list[int], ...]
    """Order in which options are given to the layers: minimum-memory first, offloading last."""
    counts: tuple[IntArray, ...]
    """Number of layers of each group that use each of its options, shape (num_mixtures, num_options)."""
    base: FloatArray
    """Amounts if every layer uses its first option, shape (6,)."""
    front: IntArray
    front_without_offload: IntArray
    """Pareto set of all mixtures, and of those without offloading, by increasing bytes."""

    def layers(self, number: int) -> tuple[str, ...]:
        """Return the strategy of every layer of one mixture. Equal layers use the order of `layer_order`."""
        found = [""] * sum(len(places) for _, places in self.groups)
        for (options, places), order, counts in zip(self.groups, self.layer_order, self.counts, strict=True):
            names: list[str] = []
            each = counts[number].tolist()
            for i in order:
                names += [options[i].strategy] * each[i]
            for place, name in zip(places, names, strict=True):
                found[place] = name
        return tuple(found)


def mix(layers: Sequence[Sequence[LayerOption]]) -> Mixtures:
    """Compute the Pareto set of mixtures from the options of each layer, in order. Equal layers have equal options.

    Raise `InputError` if there are no layers, or one has no options.
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
        own, base = counts.astype(np.float64) @ table, base + len(places) * table[0]
        if not picked:
            amounts = own
            picked = [counts]
            continue
        best = _candidate_rows(amounts)
        amounts = (amounts[best, None, :] + own).reshape(-1, len(_NOTHING[0]))
        picked = [np.repeat(rows[best], len(counts), axis=0) for rows in picked] + [np.tile(counts, (len(best), 1))]
    times = pass_times(amounts).sum(axis=1)
    free = _front(amounts, times, amounts[:, HOST] == 0)
    front = _front(amounts, times) if amounts[:, HOST].any() else free
    layer_order = tuple(
        sorted(range(len(options)), key=lambda i: (options[i].host_bytes > 0, options[i].activation_bytes))
        for options in groups
    )
    return Mixtures(amounts, times, tuple(groups.items()), layer_order, tuple(picked), base, front, free)


_NOTHING: FloatArray = np.zeros((1, 6))


def pass_times(amounts: FloatArray) -> FloatArray:
    """Return the times of the forward and of the backward, shape (num_mixtures, 2), at least those of their copies."""
    found: FloatArray = np.maximum(amounts[:, : BACKWARD + 1], amounts[:, OUT:])
    return found


def _candidate_rows(amounts: FloatArray) -> IntArray:
    """Return rows that may be part of a best mixture, for any amounts of the other layers' copies."""
    time, copied = amounts[:, FORWARD] + amounts[:, BACKWARD], amounts[:, OUT] + amounts[:, IN]
    fronts = [_front(amounts, time, amounts[:, HOST] == 0)]
    if copied.any():
        fronts += [_front(amounts, time + price * copied) for price in LANE_PRICES]
    return np.unique(np.concatenate(fronts))


def _front(amounts: FloatArray, time: FloatArray, among: npt.NDArray[np.bool_] | None = None) -> IntArray:
    """Return the Pareto set of rows in bytes and time, by increasing bytes; only ``among`` some rows if given."""
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
    """Return all ways to assign equal layers to options, shape (num_ways, num_options).

    If there are many layers, groups of them change together.
    """
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
    """Return the fastest and the minimum-memory mixture of a front, and the fastest in equal ranges of bytes.

    There are ``most - 2`` ranges. Raise `InputError` if ``most`` is below 2.
    """
    if most < 2:
        raise InputError("candidates", f"{most} is below 2", "the fastest and the minimum-memory one are always there")
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


def pareto_steps(found: Mixtures, num_free: int, num_offloading: int) -> list[int]:
    """Return mixtures at even steps of bytes, so that the same step is a comparable setting on every chunk.

    These are ``num_free`` mixtures without offloading, from the fastest to the minimum-memory one; then
    ``num_offloading`` of all mixtures, if any offloads. Some may be repeated.
    """
    free = _steps(found, found.front_without_offload, _parts(num_free))
    if found.front is found.front_without_offload:
        return free
    return free + _steps(found, found.front, _parts(num_offloading + 1)[1:])


@cache
def _parts(number: int) -> FloatArray:
    return np.linspace(1.0, 0.0, number)


def _steps(found: Mixtures, front: IntArray, parts: FloatArray) -> list[int]:
    """Return the fastest mixture within each limit of bytes.

    Limits are fractions of the way from the minimum-memory mixture of a front to the fastest without offloading.
    """
    held = found.amounts[front, HELD]
    top = found.amounts[found.front_without_offload[-1], HELD]
    chosen: list[int] = front[np.searchsorted(held, held[0] + parts * (top - held[0]), "right") - 1].tolist()
    return chosen
