"""The runtime, which executes plans on `torch.distributed`. Only this package and its users import torch.

The names below are imported on first use, because every rank is a process that pays for its imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.lazy import lazy_names

if TYPE_CHECKING:
    from pipeloom.runtime.checkpoint.checkpoint import load_checkpoint, load_weights, save_checkpoint
    from pipeloom.runtime.checkpoint.resume import Checkpoints
    from pipeloom.runtime.checkpoint.saver import Saving
    from pipeloom.runtime.data.batches import Batches
    from pipeloom.runtime.data.dataset import CorruptSampleError, Dataset, LazySample
    from pipeloom.runtime.data.prefetch import DescribedBatch, Prefetched, Size, batch_of
    from pipeloom.runtime.execute.executor import Executor
    from pipeloom.runtime.execute.options import ExecutionOptions, ExecutorOptions
    from pipeloom.runtime.execute.result import ActionTime, StepReport, StepResult
    from pipeloom.runtime.launch.device import choose_device, group_device
    from pipeloom.runtime.launch.mesh import Mesh, make_mesh
    from pipeloom.runtime.launch.processes import Worker, join_workers, report, this_worker
    from pipeloom.runtime.launch.store import TcpPlanStore
    from pipeloom.runtime.launch.transport import BatchedTransport, HostTransport, ThreadHub, TorchTransport, Transport
    from pipeloom.runtime.measure.emulation import emulate, step_durations
    from pipeloom.runtime.measure.measure import MeasureOptions, ProfileOptions, measure_layers, profile_model
    from pipeloom.runtime.measure.reference import run_undivided
    from pipeloom.runtime.measure.shapes import find_shapes, with_shapes
    from pipeloom.runtime.model.model import Emit, Model, Module, Part, user_code
    from pipeloom.runtime.model.reduce import all_reduce_gradients, clip_gradients, global_targets, mesh_gradients
    from pipeloom.runtime.model.sharding import shard_layers
    from pipeloom.runtime.model.tied import sums_over_ranks
    from pipeloom.runtime.train.trainer import Trainer

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
    "ExecutionOptions",
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
    "Saving",
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
    "batch_of",
    "choose_device",
    "clip_gradients",
    "emulate",
    "find_shapes",
    "global_targets",
    "group_device",
    "join_workers",
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
