"""Static heuristics: orders of groups that cost nothing to make, and are often nearly good enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipeloom.search.kernels import codes
from pipeloom.search.packed import Groups, PackedGraph
from pipeloom.search.params import DEFAULTS
from pipeloom.taskgraph import IntArray


class Start(NamedTuple):
    """An order of groups (forward, then backward) and the choices that go with it."""

    name: str
    order: IntArray
    choice: IntArray


def starts(
    packed: PackedGraph, groups: Groups, rule: int, late_parts: Sequence[float] = DEFAULTS.static_orders.late_parts
) -> Iterator[Start]:
    """First in, first out; then all others, each under several choices; the most promising early.

    ``late_parts``: see `pipeloom.search.params.StaticOrderParams`.
    """
    usual = _usual(packed, groups, rule)
    yield next(usual)
    if rule == codes.UNLIMITED and groups.ends.any():
        yield from _late_ends(packed, groups, late_parts)
    yield from usual


def _usual(packed: PackedGraph, groups: Groups, rule: int) -> Iterator[Start]:
    """Forward groups go microbatch by microbatch, or, where a module passes the ranks more than once, pass by
    pass in rounds of as many microbatches as there are ranks (as interleaved 1F1B does), or later modules and
    passes before earlier ones.
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
        arrangements = [("", by_microbatch)] + ([(", in rounds", rounds)] if several_passes else [])
        # A microbatch that must wait for memory then holds up none that has begun.
        arrangements.append((", begun first", (place, -_stage(groups))))
        for suffix, keys in arrangements:
            ahead = _sorted(forward, keys)
            for back_name, back_keys in (("same", keys), ("longest tail", (place, -groups.tail))):
                order = np.concatenate([ahead, _sorted(backward, back_keys)])
                for policy in policies:
                    for weight in weights:
                        label = f"{name}{suffix}, backwards {back_name}, policy {policy}{weight}"
                        choice = np.array([policy, weight, rule, 1, codes.ALL_URGENT], np.int64)
                        yield Start(label, order, choice)


def _late_ends(packed: PackedGraph, groups: Groups, parts: Sequence[float]) -> Iterator[Start]:
    """Backwards that nothing waits for run only where a rank would idle, until nothing else is left; then they
    fill all ranks without a gap, the longest first, so that little is under way at the end. Those of all
    microbatches would come too late on the first rank, so only the shortest wait, up to a part of all work.
    """
    forward, backward = _halves(packed)
    ends = np.flatnonzero(groups.ends)
    ends = ends[np.argsort(groups.tail[ends], kind="stable")]
    # All of it may take no time at all.
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
    """Numbers of forward and of backward groups."""
    num_forward, num_backward = packed.num_groups.tolist()
    return np.arange(num_forward), np.arange(num_forward, num_forward + num_backward)


def _stage(groups: Groups) -> IntArray:
    """Later modules and passes have larger numbers."""
    stage: IntArray = groups.module * (1 + int(groups.depth.max(initial=0))) + groups.depth
    return stage


def turns_of(groups: Groups) -> dict[str, IntArray]:
    """Turn of every microbatch (by number) under several sortings."""
    count = int(groups.microbatch.max()) + 1
    work = np.bincount(groups.microbatch, weights=groups.work, minlength=count)
    rising = np.argsort(work, kind="stable")
    # Small ones at both ends, where only few microbatches are under way, large ones between; and the opposite.
    hill = np.concatenate([rising[::2], rising[1::2][::-1]])
    valley = np.concatenate([rising[::-1][::2], rising[::-1][1::2][::-1]])
    # Multiples of the golden ratio spread evenly: any few neighbours have small and large ones among them.
    spread = np.argsort(np.argsort(np.arange(count) * ((5**0.5 - 1) / 2) % 1.0))
    # A few that are not large fill the pipeline soon, others are left to drain it.
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
    """Groups by keys, the last key counting most."""
    order: IntArray = groups[np.lexsort(tuple(key[groups] for key in keys))]
    return order
