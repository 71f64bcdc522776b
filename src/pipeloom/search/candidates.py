"""Candidates of a pair from the strategies of its layers (DIP §5.3)."""

from __future__ import annotations

from typing import NamedTuple

from pipeloom.cost import mixtures
from pipeloom.taskgraph import Candidate


class LayerOption(NamedTuple):
    """One strategy of one layer."""

    strategy: str
    forward_ns: int
    backward_ns: int
    activation_bytes: int


def pair_candidates(layers: list[list[LayerOption]], most: int = 10) -> tuple[Candidate, ...]:
    """Return up to ``most`` candidates: the fastest, the minimum-memory one, and the fastest in each of ``most - 2``
    equal ranges of bytes between the two.

    Each is the best of its range of all combinations of the layers' strategies, see `pipeloom.cost.mixtures`. The
    fastest comes first.

    Parameters
    ----------
    layers : list of list of LayerOption
        The options of every layer, in order.
    most : int
        At least 2.
    """
    found = mixtures.mix([[mixtures.LayerOption(*option) for option in options] for options in layers])
    chosen = []
    for row in mixtures.ranges(found, found.front, most):
        ahead, back, held = (round(amount) for amount in found.amounts[row, :3])
        names = found.layers(row)
        chosen.append(Candidate(_name(names), ahead, back, 0, held, held, names))
    return tuple(chosen)


def _name(names: tuple[str, ...]) -> str:
    return names[0] if len(set(names)) == 1 else "mixed"
