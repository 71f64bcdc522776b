"""The runtime: plans executed on `torch.distributed`. The only home of torch."""

from pipeloom.runtime.checkpoint import load_checkpoint, save_checkpoint
from pipeloom.runtime.emulate import emulate, step_durations
from pipeloom.runtime.executor import ActionTime, Executor, StepResult
from pipeloom.runtime.launch import launch, report
from pipeloom.runtime.measure import measure_layers
from pipeloom.runtime.model import Model, Module, Part, user_code
from pipeloom.runtime.profile import profile_model
from pipeloom.runtime.reduce import all_reduce_gradients
from pipeloom.runtime.reference import run_undivided
from pipeloom.runtime.store import TcpPlanStore
from pipeloom.runtime.trainer import StepReport, Trainer
from pipeloom.runtime.transport import ThreadHub, TorchTransport, Transport

__all__ = [
    "ActionTime",
    "Executor",
    "Model",
    "Module",
    "Part",
    "StepReport",
    "StepResult",
    "TcpPlanStore",
    "ThreadHub",
    "TorchTransport",
    "Trainer",
    "Transport",
    "all_reduce_gradients",
    "emulate",
    "launch",
    "load_checkpoint",
    "measure_layers",
    "profile_model",
    "report",
    "run_undivided",
    "save_checkpoint",
    "step_durations",
    "user_code",
]
