"""Layouts by DIP's rules (`dip.txt` §4)."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.compare.baseline import by_time
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster
from pipeloom.layout import ModulePlacement, by_count, even_layout, modality_placements, separate
from pipeloom.layout.modality import typical_lengths
from pipeloom.spec import Layout


def dip_layout(case: ModelOnCluster, batches: Sequence[Microbatches]) -> Layout:
    """Return DIP's layout as published: sizes and segments by its rules, equal numbers of layers."""
    return separate(case.model, case.num_ranks, _placements_by_rule(case, batches), by_count)


def our_layout(case: ModelOnCluster, batches: Sequence[Microbatches]) -> Layout:
    """Return the paper's sizes and segments, with layers assigned so that all ranks take equal time."""
    return even_layout(case.model, case.num_ranks, _placements_by_rule(case, batches), by_time(case, batches))


def _placements_by_rule(case: ModelOnCluster, batches: Sequence[Microbatches]) -> dict[str, ModulePlacement]:
    typical = typical_lengths(case.model, [microbatch for microbatches in batches for microbatch in microbatches])
    return modality_placements(case.model, case.costs, case.num_ranks, typical)
