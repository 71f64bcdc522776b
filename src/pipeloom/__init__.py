"""Pipeloom: plans, emulates and runs pipeline-parallel training of unequal models on unequal data.

The names below are the public ones. They are imported when first used, so that ``import pipeloom`` costs
nothing and planning needs neither torch nor the kernels before they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.lazy import lazy_names
from pipeloom.version import __version__

if TYPE_CHECKING:
    from pipeloom.errors import (
        ExecutionError,
        InfeasibleError,
        InputError,
        NothingFoundError,
        PipeloomError,
        PlanError,
        PlannerError,
    )
    from pipeloom.integrations.data.processed import ArrowDataset, ParquetDataset, WebDataset
    from pipeloom.integrations.diffusers.build import from_diffusers
    from pipeloom.integrations.diffusers.flow import FlowMatching
    from pipeloom.integrations.export import export
    from pipeloom.integrations.transformers.build import from_transformers
    from pipeloom.integrations.transformers.check import check_gradients
    from pipeloom.io import (
        load,
        read_instance,
        read_layout,
        read_samples,
        read_schedule,
        write_instance,
        write_layout,
        write_schedule,
    )
    from pipeloom.layout import ModulePlacement, separate
    from pipeloom.packing import PackingSpec
    from pipeloom.plan import ExecutionPlan, verify
    from pipeloom.planner import Planner
    from pipeloom.planner.planning import PlannedBatch, plan_batch
    from pipeloom.planner.problem import PlanningProblem, Problem, Setup
    from pipeloom.runtime import (
        Batches,
        Checkpoints,
        CorruptSampleError,
        Dataset,
        Emit,
        ExecutionOptions,
        Executor,
        Model,
        Module,
        Part,
        Prefetched,
        ProfileOptions,
        Saving,
        Size,
        TcpPlanStore,
        Trainer,
        batch_of,
        find_shapes,
        load_weights,
        profile_model,
        run_undivided,
    )
    from pipeloom.runtime.launch.processes import launch
    from pipeloom.search import Budget, Deadline, Evaluations, Solution, solve
    from pipeloom.spec import Batch, Chunk, Layout, Parallelism, RankSpec, Sample, TensorShape
    from pipeloom.taskgraph import Edges, Pairs, TaskGraph, Tasks, make_graph
    from pipeloom.timeline import LowerBound, Schedule, Timeline, check, lower_bound, simulate
    from pipeloom.training import (
        Callback,
        CheckpointConfig,
        EmaConfig,
        EvaluationConfig,
        LayoutConfig,
        LogConfig,
        OptimizerConfig,
        ParallelConfig,
        PlannerConfig,
        RunConfig,
        RuntimeConfig,
        SchedulerConfig,
        Summary,
        Task,
        TrainingRun,
    )
    from pipeloom.training.config import TrainConfig
    from pipeloom.training.emulation import Emulation, emulate
    from pipeloom.training.one_call import FitResult, fit

__getattr__, __dir__ = lazy_names(__name__, __file__)

__all__ = [
    "ArrowDataset",
    "Batch",
    "Batches",
    "Budget",
    "Callback",
    "CheckpointConfig",
    "Checkpoints",
    "Chunk",
    "CorruptSampleError",
    "Dataset",
    "Deadline",
    "Edges",
    "EmaConfig",
    "Emit",
    "Emulation",
    "EvaluationConfig",
    "Evaluations",
    "ExecutionError",
    "ExecutionOptions",
    "ExecutionPlan",
    "Executor",
    "FitResult",
    "FlowMatching",
    "InfeasibleError",
    "InputError",
    "Layout",
    "LayoutConfig",
    "LogConfig",
    "LowerBound",
    "Model",
    "Module",
    "ModulePlacement",
    "NothingFoundError",
    "OptimizerConfig",
    "PackingSpec",
    "Pairs",
    "ParallelConfig",
    "Parallelism",
    "ParquetDataset",
    "Part",
    "PipeloomError",
    "PlanError",
    "PlannedBatch",
    "Planner",
    "PlannerConfig",
    "PlannerError",
    "PlanningProblem",
    "Prefetched",
    "Problem",
    "ProfileOptions",
    "RankSpec",
    "RunConfig",
    "RuntimeConfig",
    "Sample",
    "Saving",
    "Schedule",
    "SchedulerConfig",
    "Setup",
    "Size",
    "Solution",
    "Summary",
    "Task",
    "TaskGraph",
    "Tasks",
    "TcpPlanStore",
    "TensorShape",
    "Timeline",
    "TrainConfig",
    "Trainer",
    "TrainingRun",
    "WebDataset",
    "__version__",
    "batch_of",
    "check",
    "check_gradients",
    "emulate",
    "export",
    "find_shapes",
    "fit",
    "from_diffusers",
    "from_transformers",
    "launch",
    "load",
    "load_weights",
    "lower_bound",
    "make_graph",
    "plan_batch",
    "profile_model",
    "read_instance",
    "read_layout",
    "read_samples",
    "read_schedule",
    "run_undivided",
    "separate",
    "simulate",
    "solve",
    "verify",
    "write_instance",
    "write_layout",
    "write_schedule",
]
