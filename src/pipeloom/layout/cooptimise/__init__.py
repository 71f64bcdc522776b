"""Partition, placement and schedule of a chain of layers, searched together (AdaPtis, and beyond)."""

from pipeloom.layout.cooptimise.bound import placement_bound
from pipeloom.layout.cooptimise.evaluate import evaluate, schedule_of
from pipeloom.layout.cooptimise.joint import CooptimisedPipeline, cooptimise
from pipeloom.layout.cooptimise.layer_chain import LayerChain, PartitionPlacement, chain_of_layers, graph_of, layout_of
from pipeloom.layout.cooptimise.params import CooptimiseParams
from pipeloom.layout.cooptimise.rules import PriorityRule
from pipeloom.layout.cooptimise.standard import in_memory_of_1f1b, one_f_one_b_peaks

__all__ = [
    "CooptimiseParams",
    "CooptimisedPipeline",
    "LayerChain",
    "PartitionPlacement",
    "PriorityRule",
    "chain_of_layers",
    "cooptimise",
    "evaluate",
    "graph_of",
    "in_memory_of_1f1b",
    "layout_of",
    "one_f_one_b_peaks",
    "placement_bound",
    "schedule_of",
]
