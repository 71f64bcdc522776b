"""The runtime: plans executed on `torch.distributed`. The only home of torch.

The names below are imported when first used: ranks are processes of their own, and each pays for what it imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.lazy import lazy_names

if TYPE_CHECKING:
    from pipeloom.runtime.batches import Batches
    from pipeloom.runtime.checkpoint import load_checkpoint, load_weights, save_checkpoint
    from pipeloom.runtime.dataset import CorruptSampleError, Dataset, LazySample
    from pipeloom.runtime.device import choose_device, group_device
    from pipeloom.runtime.emulation import emulate, step_durations
    from pipeloom.runtime.executor import Executor
    from pipeloom.runtime.iteration import ExecutorOptions
    from pipeloom.runtime.measure import MeasureOptions, ProfileOptions, measure_layers, profile_model
    from pipeloom.runtime.mesh import Mesh, make_mesh
    from pipeloom.runtime.model import Emit, Model, Module, Part, user_code
    from pipeloom.runtime.prefetch import DescribedBatch, Prefetched, Size, batch_of
    from pipeloom.runtime.processes import Worker, join_workers, launch, report, this_worker
    from pipeloom.runtime.reduce import all_reduce_gradients, clip_gradients, global_targets, mesh_gradients
    from pipeloom.runtime.reference import run_undivided
    from pipeloom.runtime.result import ActionTime, StepReport, StepResult
    from pipeloom.runtime.resume import Checkpoints
    from pipeloom.runtime.shapes import find_shapes, with_shapes
    from pipeloom.runtime.sharding import shard_layers
    from pipeloom.runtime.store import TcpPlanStore
    from pipeloom.runtime.tied import sums_over_ranks
    from pipeloom.runtime.trainer import Trainer, TrainerOptions
    from pipeloom.runtime.transport import BatchedTransport, HostTransport, ThreadHub, TorchTransport, Transport

__getattr__, __dir__ = lazy_names(__name__, __file__)

__all__ = [
    "ActionTime",
    "BatchedTransport",
    "Batches",
    "Checkpoints",
    "CorruptSampleError",
    "Dataset",
    "DescribedBatch",
    "Emit",
    "Executor",
    "ExecutorOptions",
    "HostTransport",
    "LazySample",
    "MeasureOptions",
    "Mesh",
    "Model",
    "Module",
    "Part",
    "Prefetched",
    "ProfileOptions",
    "Size",
    "StepReport",
    "StepResult",
    "TcpPlanStore",
    "ThreadHub",
    "TorchTransport",
    "Trainer",
    "TrainerOptions",
    "Transport",
    "Worker",
    "all_reduce_gradients",
    "batch_of",
    "choose_device",
    "clip_gradients",
    "emulate",
    "find_shapes",
    "global_targets",
    "group_device",
    "join_workers",
    "launch",
    "load_checkpoint",
    "load_weights",
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
    "with_shapes",
]
