"""Strategies as DIP offers them (`dip.txt` §5.3): ten a pair, in even ranges of bytes, offload included."""

from __future__ import annotations

from pipeloom.compare.model_on_cluster import ModelOnCluster
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.cost.emulated_mixtures import Ladder
from pipeloom.cost.mixtures import Mixtures, ranges

MOST = 10
"""The paper's S."""


class KnapsackCosts(EmulatedCosts):
    """Costs that offer the fastest mixture, the leanest, and the fastest in each of eight ranges of bytes between.

    All mixtures of the layers' strategies count, those that offload too. Keeping everything comes first, as everywhere;
    where another is as fast and holds less, it is offered beside it.
    """

    def _offered(self, found: Mixtures) -> list[int]:
        keep = int(found.free_front[-1])
        rows = [keep, *(row for row in ranges(found, found.front, MOST) if row != keep)]
        return rows + rows[-1:] * (MOST + 1 - len(rows))


def knapsack_costs(case: ModelOnCluster) -> KnapsackCosts:
    """Costs of a model on a cluster with DIP's own candidates."""
    return KnapsackCosts(case.architecture, case.cluster, case.degrees, split=False, ladder=Ladder())
