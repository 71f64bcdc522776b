"""Layouts by DIP's rules (`dip.txt` §4)."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.compare.baseline import by_time
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster
from pipeloom.layout import ModulePlacement, by_count, even_layout, modality_placements, separate
from pipeloom.layout.modality import typical_lengths
from pipeloom.spec import Layout


def dip_layout(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> Layout:
    """Return DIP's layout as published: sizes and segments by its rules, equal numbers of layers."""
    return separate(setting.model, setting.num_ranks, _placements_by_rule(setting, batches), by_count)


def our_layout(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> Layout:
    """Return the paper's sizes and segments, with layers assigned so that all ranks take equal time."""
    return even_layout(
        setting.model, setting.num_ranks, _placements_by_rule(setting, batches), by_time(setting, batches)
    )


def _placements_by_rule(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> dict[str, ModulePlacement]:
    typical = typical_lengths(setting.model, [microbatch for microbatches in batches for microbatch in microbatches])
    return modality_placements(setting.model, setting.costs, setting.num_ranks, typical)
