"""Per-iteration tuning of 1F1B with encoders on the first rank: microbatch size, order, pre-computation (PipeTune)."""

from pipeloom.tuning.pipeline import TunedPipeline, batch_sizes, check_layout, is_chain, tuned_pipeline
from pipeloom.tuning.replicas import Replica, tune_replicas
from pipeloom.tuning.schedule import TunedPlan, tuned_plan
from pipeloom.tuning.spec import TuningSpec
from pipeloom.tuning.tune import TuningResult, compile_kernels, tune

__all__ = [
    "Replica",
    "TunedPipeline",
    "TunedPlan",
    "TuningResult",
    "TuningSpec",
    "batch_sizes",
    "check_layout",
    "compile_kernels",
    "is_chain",
    "tune",
    "tune_replicas",
    "tuned_pipeline",
    "tuned_plan",
]
