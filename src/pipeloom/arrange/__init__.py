"""How a Layout is chosen: modality-aware partitioning, and the chains of stages that others use."""

from pipeloom.arrange.layouts import LayerLoad, ModulePlacement, chain, separate, single_rank, typical_seconds
from pipeloom.arrange.partition import partition_chain

__all__ = [
    "LayerLoad",
    "ModulePlacement",
    "chain",
    "partition_chain",
    "separate",
    "single_rank",
    "typical_seconds",
]
