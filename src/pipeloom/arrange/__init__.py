"""How a Layout is chosen: modality-aware partitioning, and the chains of stages that others use."""

from pipeloom.arrange.layouts import (
    LayerLoad,
    ModulePlacement,
    chain,
    encoder_first,
    separate,
    single_rank,
    typical_seconds,
)
from pipeloom.arrange.modality import (
    SizeChoice,
    even_layout,
    modality_placements,
    segment_counts,
    sub_microbatch_size,
)
from pipeloom.arrange.partition import partition_chain

__all__ = [
    "LayerLoad",
    "ModulePlacement",
    "SizeChoice",
    "chain",
    "encoder_first",
    "even_layout",
    "modality_placements",
    "partition_chain",
    "segment_counts",
    "separate",
    "single_rank",
    "sub_microbatch_size",
    "typical_seconds",
]
