"""Static heuristics: orders of groups that cost nothing to make, and are often nearly good enough."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipeloom.search import kernels
from pipeloom.search.problem import Groups, Problem
from pipeloom.taskgraph import IntArray


class Start(NamedTuple):
    """An order of groups (forward, then backward) and the choices that go with it."""

    name: str
    order: IntArray
    choice: IntArray


def starts(problem: Problem, groups: Groups, rule: int) -> Iterator[Start]:
    """First in, first out; then all others, each under several choices.

    Forward groups go microbatch by microbatch, or, where a module passes the ranks more than once, pass by
    pass in rounds of as many microbatches as there are ranks (as interleaved 1F1B does), or later modules and
    passes before earlier ones.
    """
    num_forward = int(problem.num_groups[0])
    num_ranks = len(problem.room)
    stage = groups.module * (1 + int(groups.depth.max(initial=0))) + groups.depth
    forward, backward = np.arange(num_forward), np.arange(num_forward, len(groups.first))
    several_passes = bool((groups.depth > 0).any())
    policies = (kernels.ALTERNATE, kernels.BACKWARD_FIRST)
    weights = (
        (kernels.WEIGHT_LAST, kernels.WEIGHT_AT_ONCE)
        if problem.class_start[3] > problem.class_start[2]
        else (0,)
    )
    for name, turn in _turns(groups).items():
        place = turn[groups.microbatch]
        by_microbatch = (groups.first, place)
        rounds = (groups.first, place, groups.depth, place // num_ranks)
        arrangements = [("", by_microbatch)] + ([(", in rounds", rounds)] if several_passes else [])
        # A microbatch that must wait for memory then holds up none that has begun.
        arrangements.append((", begun first", (place, -stage)))
        for suffix, keys in arrangements:
            ahead = _sorted(forward, keys)
            for back_name, back_keys in (
                ("same", keys),
                ("longest tail", (place, -groups.tail)),
            ):
                order = np.concatenate([ahead, _sorted(backward, back_keys)])
                for policy in policies:
                    for weight in weights:
                        label = f"{name}{suffix}, backwards {back_name}, policy {policy}{weight}"
                        yield Start(label, order, np.array([policy, weight, rule, 1], np.int64))


def _turns(groups: Groups) -> dict[str, IntArray]:
    """Turn of every microbatch (by number) under several sortings."""
    count = int(groups.microbatch.max()) + 1
    work = np.bincount(groups.microbatch, weights=groups.work, minlength=count)
    rising = np.argsort(work, kind="stable")
    # Small ones at both ends, where only few microbatches are under way, large ones between; and the opposite.
    hill = np.concatenate([rising[::2], rising[1::2][::-1]])
    valley = np.concatenate([rising[::-1][::2], rising[::-1][1::2][::-1]])
    # Multiples of the golden ratio spread evenly: any few neighbours have small and large ones among them.
    spread = np.argsort(np.argsort(np.arange(count) * ((5**0.5 - 1) / 2) % 1.0))
    sortings = {
        "first in, first out": np.arange(count),
        "large first": rising[::-1],
        "small first": rising,
        "large between": hill,
        "small between": valley,
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
