"""Partition, placement and schedule of a chain of layers, searched together (AdaPtis, and beyond)."""

from pipeloom.layout.cooptimize.bound import placement_bound
from pipeloom.layout.cooptimize.evaluate import evaluate, schedule_of
from pipeloom.layout.cooptimize.joint import CooptimizedPipeline, cooptimize
from pipeloom.layout.cooptimize.layer_chain import LayerChain, PartitionPlacement, chain_of_layers, graph_of, layout_of
from pipeloom.layout.cooptimize.params import CooptimizeParams
from pipeloom.layout.cooptimize.rules import PriorityRule
from pipeloom.layout.cooptimize.standard import in_memory_of_1f1b, one_f_one_b_peaks

__all__ = [
    "CooptimizeParams",
    "CooptimizedPipeline",
    "LayerChain",
    "PartitionPlacement",
    "PriorityRule",
    "chain_of_layers",
    "cooptimize",
    "evaluate",
    "graph_of",
    "in_memory_of_1f1b",
    "layout_of",
    "one_f_one_b_peaks",
    "placement_bound",
    "schedule_of",
]
