"""Baselines: the schedules that others run, on the same graph, costs and checker."""

from pipeloom.baselines.dualpipev import dual_pipe_v
from pipeloom.baselines.fsdp import fsdp_seconds
from pipeloom.baselines.megatron import gpipe, interleaved_one_f_one_b, one_f_one_b
from pipeloom.baselines.nnscaler import StaticStages, best_stages
from pipeloom.baselines.optimus import optimus_coarse
from pipeloom.baselines.optimus_fine import optimus_fine
from pipeloom.baselines.stages import Chain, chain_of
from pipeloom.baselines.zero_bubble import zero_bubble_h1

__all__ = [
    "Chain",
    "StaticStages",
    "best_stages",
    "chain_of",
    "dual_pipe_v",
    "fsdp_seconds",
    "gpipe",
    "interleaved_one_f_one_b",
    "one_f_one_b",
    "optimus_coarse",
    "optimus_fine",
    "zero_bubble_h1",
]
