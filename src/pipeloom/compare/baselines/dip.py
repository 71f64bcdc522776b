"""Layouts by DIP's rules (`dip.txt` §4)."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.compare.baseline import by_time
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster
from pipeloom.layout import ModulePlacement, by_count, even_layout, modality_placements, separate
from pipeloom.layout.modality import typical_lengths
from pipeloom.spec import Layout


def dip_layout(case: ModelOnCluster, batches: Sequence[Microbatches]) -> Layout:
    """DIP's layout as published: sizes and segments by its rules, equal numbers of layers."""
    places = _placements_by_rule(case, batches)
    return separate(case.model, case.num_ranks, places, by_count)


def our_layout(case: ModelOnCluster, batches: Sequence[Microbatches]) -> Layout:
    """The paper's sizes and segments, with layers dealt so that all ranks have equal time."""
    places = _placements_by_rule(case, batches)
    return even_layout(case.model, case.num_ranks, places, by_time(case, batches))


def _placements_by_rule(case: ModelOnCluster, batches: Sequence[Microbatches]) -> dict[str, ModulePlacement]:
    typical = typical_lengths(case.model, [group for groups in batches for group in groups])
    return modality_placements(case.model, case.costs, case.num_ranks, typical)
