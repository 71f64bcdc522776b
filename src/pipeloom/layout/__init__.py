"""Choose a `Layout`.

- By modality: `layouts` and `stages` build the layouts, and `modality` has DIP's rules for sizes and segments.
- By search: `choose` plans sampled batches under many layouts. `training` does this for a training run.
- By co-optimization: `cooptimize` searches partition, placement and schedule of a chain of layers together, on a layer
  table that `profiled_layers` writes.
"""

from pipeloom.layout.layouts import (
    LayerLoad,
    ModulePlacement,
    by_count,
    layout_for,
    partition_chain,
    replicated,
    separate,
    single_rank,
    typical_seconds,
)
from pipeloom.layout.modality import SizeChoice, even_layout, modality_placements, segment_counts, sub_microbatch_size
from pipeloom.layout.profiled_layers import profiled_layers
from pipeloom.layout.stages import (
    blocks_of_stages,
    chain_of_stages,
    encoder_first,
    encoders_in_first_stage,
    layout_of_stages,
)

__all__ = [
    "LayerLoad",
    "ModulePlacement",
    "SizeChoice",
    "blocks_of_stages",
    "by_count",
    "chain_of_stages",
    "encoder_first",
    "encoders_in_first_stage",
    "even_layout",
    "layout_for",
    "layout_of_stages",
    "modality_placements",
    "partition_chain",
    "profiled_layers",
    "replicated",
    "segment_counts",
    "separate",
    "single_rank",
    "sub_microbatch_size",
    "typical_seconds",
]
