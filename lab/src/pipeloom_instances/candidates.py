"""Candidates of a pair from the strategies of its layers (DIP §5.3)."""

from __future__ import annotations

from pipeloom.cost.mixtures import LayerOption, mix, ranges
from pipeloom.taskgraph import Candidate


def pair_candidates(layers: list[list[LayerOption]], most: int = 10) -> tuple[Candidate, ...]:
    """Return up to ``most`` candidates: the fastest, the minimum-memory one, and the fastest in each of ``most - 2``
    equal ranges of bytes between the two.

    Each is the best of its range of all combinations of the layers' strategies, see `pipeloom.cost.mixtures`. The
    fastest comes first.

    Parameters
    ----------
    layers : list of list of LayerOption
        The options of every layer, in order. Times are in ns.
    most : int
        At least 2.
    """
    found = mix(layers)
    chosen = []
    for row in ranges(found, found.front, most):
        ahead, back, held = (round(amount) for amount in found.amounts[row, :3])
        names = found.layers(row)
        chosen.append(Candidate(_name(names), ahead, back, 0, held, held, names))
    return tuple(chosen)


def _name(names: tuple[str, ...]) -> str:
    return names[0] if len(set(names)) == 1 else "mixed"
