"""How a Layout is chosen: modality-aware partitioning, the chains that others use, and the joint search."""

from pipeloom.arrange.annealing import Settings
from pipeloom.arrange.bound import placement_bound
from pipeloom.arrange.evaluate import evaluate, schedule_of
from pipeloom.arrange.given import layout_for
from pipeloom.arrange.joint import Arranged, arrange
from pipeloom.arrange.layer_chain import Arrangement, LayerChain, chain_of_layers, graph_of, layout_of
from pipeloom.arrange.layouts import (
    LayerLoad,
    ModulePlacement,
    chain,
    encoder_first,
    replicated,
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
from pipeloom.arrange.phase_by_phase import tune_phases
from pipeloom.arrange.profiled_layers import profiled_layers
from pipeloom.arrange.rules import Rule
from pipeloom.arrange.standard import one_f_one_b_peaks

__all__ = [
    "Arranged",
    "Arrangement",
    "LayerChain",
    "LayerLoad",
    "ModulePlacement",
    "Rule",
    "Settings",
    "SizeChoice",
    "arrange",
    "chain",
    "chain_of_layers",
    "encoder_first",
    "evaluate",
    "even_layout",
    "graph_of",
    "layout_for",
    "layout_of",
    "modality_placements",
    "one_f_one_b_peaks",
    "partition_chain",
    "placement_bound",
    "profiled_layers",
    "replicated",
    "schedule_of",
    "segment_counts",
    "separate",
    "single_rank",
    "sub_microbatch_size",
    "tune_phases",
    "typical_seconds",
]
