"""Training runs: measure layers, choose a layout, train over ranks, report. Shared by `pipeloom train` and Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.lazy import lazy_names

if TYPE_CHECKING:
    from pipeloom.training.callbacks import Callback
    from pipeloom.training.config import (
        CheckpointConfig,
        LayoutConfig,
        ParallelConfig,
        PlannerConfig,
        RunConfig,
        RuntimeConfig,
        read_config,
    )
    from pipeloom.training.display import Display, Lines, Quiet
    from pipeloom.training.loop_config import (
        EmaConfig,
        EvaluationConfig,
        LogConfig,
        OptimizerConfig,
        OptimizerGroup,
        RestConfig,
        SchedulerConfig,
    )
    from pipeloom.training.one_call import FitResult, fit
    from pipeloom.training.record import Row, Summary, read_history
    from pipeloom.training.run import TrainingRun
    from pipeloom.training.task import Task

__getattr__, __dir__ = lazy_names(__name__, __file__)

__all__ = [
    "Callback",
    "CheckpointConfig",
    "Display",
    "EmaConfig",
    "EvaluationConfig",
    "FitResult",
    "LayoutConfig",
    "Lines",
    "LogConfig",
    "OptimizerConfig",
    "OptimizerGroup",
    "ParallelConfig",
    "PlannerConfig",
    "Quiet",
    "RestConfig",
    "Row",
    "RunConfig",
    "RuntimeConfig",
    "SchedulerConfig",
    "Summary",
    "Task",
    "TrainingRun",
    "fit",
    "read_config",
    "read_history",
]
