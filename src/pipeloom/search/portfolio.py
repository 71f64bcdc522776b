"""Static heuristics: orders of groups that are cheap to construct and often close to the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipeloom.search.kernels import codes
from pipeloom.search.packed import Groups, PackedGraph
from pipeloom.search.params import DEFAULTS
from pipeloom.taskgraph import IntArray


class Start(NamedTuple):
    """An order of groups (forward, then backward) and its choices."""

    name: str
    order: IntArray
    choice: IntArray


def starts(
    packed: PackedGraph, groups: Groups, rule: int, late_parts: Sequence[float] = DEFAULTS.static_orders.late_parts
) -> Iterator[Start]:
    """Yield first in, first out, and then all other orders, each under several choices, the most promising early.

    ``late_parts``: see `pipeloom.search.params.StaticOrderParams`.
    """
    usual = _usual(packed, groups, rule)
    yield next(usual)
    if rule == codes.UNLIMITED and groups.ends.any():
        yield from _late_ends(packed, groups, late_parts)
    yield from usual


def _usual(packed: PackedGraph, groups: Groups, rule: int) -> Iterator[Start]:
    """Yield orders of forward groups by microbatch, by round, or with later modules and passes first.

    Rounds apply if a module passes the ranks more than once. A round has one microbatch per rank and runs pass by pass,
    as in interleaved 1F1B.
    """
    forward, backward = _halves(packed)
    num_ranks = len(packed.capacity)
    several_passes = bool((groups.depth > 0).any())
    policies = (codes.ALTERNATE, codes.BACKWARD_FIRST)
    weights = (
        (codes.WEIGHT_LAST, codes.WEIGHT_AT_ONCE)
        if packed.class_start[3] > packed.class_start[2]
        else (codes.WEIGHT_LAST,)
    )
    for name, turn in turns_of(groups).items():
        place = turn[groups.microbatch]
        by_microbatch = (groups.first, place)
        rounds = (groups.first, place, groups.depth, place // num_ranks)
        key_sets = [("", by_microbatch)] + ([(", in rounds", rounds)] if several_passes else [])
        # Then a microbatch that must wait for memory does not delay microbatches that have begun.
        key_sets.append((", begun first", (place, -_stage(groups))))
        for suffix, keys in key_sets:
            ahead = _sorted(forward, keys)
            for back_name, back_keys in (("same", keys), ("longest tail", (place, -groups.tail))):
                order = np.concatenate([ahead, _sorted(backward, back_keys)])
                for policy in policies:
                    for weight in weights:
                        label = f"{name}{suffix}, backwards {back_name}, policy {policy}{weight}"
                        choice = np.array([policy, weight, rule, 1, codes.ALL_URGENT], np.int64)
                        yield Start(label, order, choice)


def _late_ends(packed: PackedGraph, groups: Groups, parts: Sequence[float]) -> Iterator[Start]:
    """Yield orders that delay backwards on which nothing depends.

    Delayed backwards run when a rank would be idle, or when no other task is left. At the end they keep all ranks busy,
    the longest first, so that little work remains in flight. Only the shortest are delayed, up to a share of all work,
    because the first rank would otherwise run too many of them at the end.
    """
    forward, backward = _halves(packed)
    ends = np.flatnonzero(groups.ends)
    ends = ends[np.argsort(groups.tail[ends], kind="stable")]
    # The total work may be 0.
    part = np.cumsum(groups.work[ends]) / max(int(groups.work.sum()), 1)
    turns = turns_of(groups)
    counts = dict.fromkeys(min(len(ends), 1 + int(np.searchsorted(part, limit))) for limit in parts)
    for name in ("few small, then large", "large first", "large between", "first in, first out"):
        place = turns[name][groups.microbatch]
        for suffix, keys in ((", begun first", (place, -_stage(groups))), ("", (groups.first, place))):
            ahead = _sorted(forward, keys)
            for count in counts:
                late = np.zeros(len(groups.first), np.int64)
                late[ends[:count]] = 1
                after = np.where(late == 1, -groups.tail, place)
                for back, back_keys in (
                    ("longest tail", (place, -groups.tail, late)),
                    ("same", (groups.first, after, late)),
                ):
                    order = np.concatenate([ahead, _sorted(backward, back_keys)])
                    urgent = len(backward) - count
                    choice = (codes.ALTERNATE, codes.WEIGHT_LAST, codes.UNLIMITED, 1, urgent)
                    label = f"{name}{suffix}, backwards {back}, {count} at the end"
                    yield Start(label, order, np.array(choice, np.int64))


def _halves(packed: PackedGraph) -> tuple[IntArray, IntArray]:
    """Return the numbers of the forward groups and of the backward groups."""
    num_forward, num_backward = packed.num_groups.tolist()
    return np.arange(num_forward), np.arange(num_forward, num_forward + num_backward)


def _stage(groups: Groups) -> IntArray:
    """Return a number for every group. Later modules and passes have larger numbers."""
    stage: IntArray = groups.module * (1 + int(groups.depth.max(initial=0))) + groups.depth
    return stage


def turns_of(groups: Groups) -> dict[str, IntArray]:
    """Return the turn of every microbatch under several sort orders, by name."""
    count = int(groups.microbatch.max()) + 1
    work = np.bincount(groups.microbatch, weights=groups.work, minlength=count)
    rising = np.argsort(work, kind="stable")
    # Small ones at both ends, where few microbatches are in flight, and large ones between; and the opposite.
    hill = np.concatenate([rising[::2], rising[1::2][::-1]])
    valley = np.concatenate([rising[::-1][::2], rising[::-1][1::2][::-1]])
    # Multiples of the golden ratio modulo 1 are evenly spread, so any few neighbors include small and large ones.
    spread = np.argsort(np.argsort(np.arange(count) * ((5**0.5 - 1) / 2) % 1.0))
    # A few of the smaller half warm the pipeline up quickly; the others remain for the cool-down.
    half = rising[: count // 2]
    few = half[::4]
    sortings = {
        "first in, first out": np.arange(count),
        "large first": rising[::-1],
        "small first": rising,
        "large between": hill,
        "small between": valley,
        "few small, then large": np.concatenate([few, np.setdiff1d(rising[::-1], few, assume_unique=True)]),
        "evenly mixed": rising[spread],
    }
    turns = {}
    for name, sequence in sortings.items():
        turn = np.empty(count, np.int64)
        turn[sequence] = np.arange(count)
        turns[name] = turn
    return turns


def _sorted(groups: IntArray, keys: tuple[IntArray, ...]) -> IntArray:
    """Return the groups sorted by keys. The last key is the primary key."""
    order: IntArray = groups[np.lexsort(tuple(key[groups] for key in keys))]
    return order
