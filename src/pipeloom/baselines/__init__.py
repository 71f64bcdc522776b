"""Baselines: the schedules that others run, on the same graph, costs and checker."""

from pipeloom.baselines.megatron import gpipe, interleaved_one_f_one_b, one_f_one_b
from pipeloom.baselines.stages import Chain, chain_of

__all__ = ["Chain", "chain_of", "gpipe", "interleaved_one_f_one_b", "one_f_one_b"]
