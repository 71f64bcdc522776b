"""The runtime: plans executed on `torch.distributed`. The only home of torch."""

from pipeloom.runtime.checkpoint import load_checkpoint, save_checkpoint
from pipeloom.runtime.device import choose_device, group_device
from pipeloom.runtime.emulate import emulate, step_durations
from pipeloom.runtime.executor import Executor
from pipeloom.runtime.launch import launch, report
from pipeloom.runtime.measure import measure_layers
from pipeloom.runtime.mesh import Mesh, make_mesh
from pipeloom.runtime.model import Model, Module, Part, user_code
from pipeloom.runtime.prefetch import DescribedBatch, Prefetched, Size
from pipeloom.runtime.profile import profile_model
from pipeloom.runtime.reduce import all_reduce_gradients, clip_gradients, global_targets, mesh_gradients
from pipeloom.runtime.reference import run_undivided
from pipeloom.runtime.result import ActionTime, StepResult
from pipeloom.runtime.resume import Checkpoints
from pipeloom.runtime.sharding import shard_layers
from pipeloom.runtime.step_report import StepReport
from pipeloom.runtime.store import TcpPlanStore
from pipeloom.runtime.tied import sums_over_ranks
from pipeloom.runtime.torchrun import Worker, join_workers, this_worker
from pipeloom.runtime.trainer import Trainer
from pipeloom.runtime.transport import BatchedTransport, ThreadHub, TorchTransport, Transport

__all__ = [
    "ActionTime",
    "BatchedTransport",
    "Checkpoints",
    "DescribedBatch",
    "Executor",
    "Mesh",
    "Model",
    "Module",
    "Part",
    "Prefetched",
    "Size",
    "StepReport",
    "StepResult",
    "TcpPlanStore",
    "ThreadHub",
    "TorchTransport",
    "Trainer",
    "Transport",
    "Worker",
    "all_reduce_gradients",
    "choose_device",
    "clip_gradients",
    "emulate",
    "global_targets",
    "group_device",
    "join_workers",
    "launch",
    "load_checkpoint",
    "make_mesh",
    "measure_layers",
    "mesh_gradients",
    "profile_model",
    "report",
    "run_undivided",
    "save_checkpoint",
    "shard_layers",
    "step_durations",
    "sums_over_ranks",
    "this_worker",
    "user_code",
]
