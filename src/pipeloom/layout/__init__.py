"""How a `Layout` is chosen.

- By modality: `layouts` has the shapes, `modality` the paper's rules for sizes and segments.
- By planning sampled batches under many of these: `choose`; `training` does so for a training run.
- Co-optimised, partition, placement and schedule of one chain of layers together: `cooptimise`, on a table of layers
  that `profiled_layers` writes.
"""

from pipeloom.layout.layouts import (
    LayerLoad,
    ModulePlacement,
    by_count,
    chain_of_stages,
    encoder_first,
    layout_for,
    partition_chain,
    replicated,
    separate,
    single_rank,
    typical_seconds,
)
from pipeloom.layout.modality import SizeChoice, even_layout, modality_placements, segment_counts, sub_microbatch_size
from pipeloom.layout.profiled_layers import profiled_layers
from pipeloom.layout.stages import blocks_of_stages, encoders_in_first_stage, layout_of_stages

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
