"""Per-iteration tuning of 1F1B with encoders on the first rank: microbatch size, order, pre-computation (PipeTune)."""

from pipeloom.tuning.kernels.workloads import Features
from pipeloom.tuning.pipeline import (
    BatchSizes,
    TunedPipeline,
    batch_sizes,
    chain_of,
    check_layout,
    is_chain,
    tuned_pipeline,
)
from pipeloom.tuning.replicas import Replica, tune_replicas
from pipeloom.tuning.schedule import TunedPlan, tuned_plan, tuned_schedule
from pipeloom.tuning.spec import TuningSpec
from pipeloom.tuning.table import CostTable, tabulate
from pipeloom.tuning.tune import TuningResult, bound_ns, compile_kernels, tune

__all__ = [
    "BatchSizes",
    "CostTable",
    "Features",
    "Replica",
    "TunedPipeline",
    "TunedPlan",
    "TuningResult",
    "TuningSpec",
    "batch_sizes",
    "bound_ns",
    "chain_of",
    "check_layout",
    "compile_kernels",
    "is_chain",
    "tabulate",
    "tune",
    "tune_replicas",
    "tuned_pipeline",
    "tuned_plan",
    "tuned_schedule",
]
