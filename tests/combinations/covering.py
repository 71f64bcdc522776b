"""What can be combined in a training run, and few rows in which every pair of choices that may be is made together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import NamedTuple, get_args, get_type_hints

from pipeloom.packing import POLICIES
from pipeloom.training import LayoutConfig

Row = Mapping[str, str]
Choice = tuple[str, str]
"""A factor, and one of its levels."""

FACTORS: dict[str, tuple[str, ...]] = {
    # 'exact' may end without the proof that it is asked for, and then there is no packing to train on.
    "policy": tuple(policy for policy in POLICIES if policy != "exact"),
    "layout": get_args(get_type_hints(LayoutConfig)["kind"]),
    "strategies": ("keep", "recompute", "chosen"),
    "split": ("whole", "split"),
    "parallel": ("none", "dp", "tp", "fsdp"),
    "encoder": ("trained", "frozen"),
    "early": ("default", "off", "frozen", "all", "clusters"),
}


class Excluded(NamedTuple):
    """Two choices that cannot be made together."""

    first: Choice
    second: Choice
    reason: str


_ONE_CHUNK = "its recurrence times 1F1B: one chunk a rank, encoders whole on the first"
_NO_CHOICE = "its recurrence times one strategy and whole backwards"

EXCLUDED: tuple[Excluded, ...] = (
    *(
        Excluded(("early", "clusters"), ("layout", kind), _ONE_CHUNK)
        for kind in FACTORS["layout"]
        if kind != "encoder_first"
    ),
    Excluded(("early", "clusters"), ("strategies", "chosen"), _NO_CHOICE),
    Excluded(("early", "clusters"), ("split", "split"), _NO_CHOICE),
)


def pairs(row: Row) -> set[frozenset[Choice]]:
    """All pairs of choices of a row, or of a part of one."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def wanted(factors: Mapping[str, tuple[str, ...]], excluded: set[frozenset[Choice]]) -> set[frozenset[Choice]]:
    """All pairs of levels that may be chosen together."""
    every = {
        frozenset(((a, x), (b, y)))
        for a, b in itertools.combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
    }
    return every - excluded


def covering(
    factors: Mapping[str, tuple[str, ...]], excluded: set[frozenset[Choice]], seed: int, tries: int = 50
) -> list[dict[str, str]]:
    """Rows with every allowed pair: greedily, each the best of some random ones that begin with an uncovered pair."""
    rng = random.Random(seed)
    left = wanted(factors, excluded)
    rows: list[dict[str, str]] = []
    while left:
        order = sorted(map(sorted, left))
        begun = [dict(rng.choice(order)) for _ in range(tries)]
        made = [row for start in begun if (row := _completed(start, factors, excluded, left, rng)) is not None]
        if not made:
            raise ValueError(f"no row has {order[0]}: what is excluded leaves no level of another factor")
        best = max(made, key=lambda row: len(pairs(row) & left))
        left -= pairs(best)
        rows.append({name: best[name] for name in factors})
    return rows


def _completed(
    start: Row,
    factors: Mapping[str, tuple[str, ...]],
    excluded: set[frozenset[Choice]],
    left: set[frozenset[Choice]],
    rng: random.Random,
) -> dict[str, str] | None:
    """Fill a row in, factor by factor, with the level that covers most; None where none may be chosen."""
    row = dict(start)
    for name in rng.sample(sorted(set(factors) - set(row)), len(factors) - len(row)):
        levels = [x for x in factors[name] if not pairs(row | {name: x}) & excluded]
        if not levels:
            return None
        rng.shuffle(levels)
        row[name] = max(levels, key=lambda x: len(pairs(row | {name: x}) & left))
    return row


def covering_set() -> list[dict[str, str]]:
    """The rows that are trained."""
    return covering(FACTORS, {frozenset((each.first, each.second)) for each in EXCLUDED}, seed=0)
