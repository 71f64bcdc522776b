"""Baselines: the schedules that others run, on the same graph, costs and checker."""

from pipeloom.lab.baselines.dualpipev import dual_pipe_v
from pipeloom.lab.baselines.fsdp import fsdp_seconds
from pipeloom.lab.baselines.joint_pipeline import joint_pipeline
from pipeloom.lab.baselines.nnscaler import StaticStages, best_stages
from pipeloom.lab.baselines.optimus import optimus_coarse
from pipeloom.lab.baselines.optimus_fine import optimus_fine
from pipeloom.lab.baselines.zero_bubble import zero_bubble_h1

__all__ = [
    "StaticStages",
    "best_stages",
    "dual_pipe_v",
    "fsdp_seconds",
    "joint_pipeline",
    "optimus_coarse",
    "optimus_fine",
    "zero_bubble_h1",
]
