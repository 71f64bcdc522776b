"""What ranks and planners import: the server that they are forked from imports this before all else."""

from importlib import import_module

for name in (
    "sklearn.datasets",
    "torch._dynamo",  # Adam imports it at its first step
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "pipeloom.cli.app",
    "pipeloom.cli.planner",
    "pipeloom.packing.kernels",
    "pipeloom.planner",
    "pipeloom.runtime.measure.measure",
    "pipeloom.runtime.train.trainer",
    "pipeloom.timeline.kernels",
    "pipeloom.training.rank",
):
    import_module(name)

# Loads planning's kernels from their cache.
import_module("tests.runtime.training").invented_problem(2).compile_kernels()
