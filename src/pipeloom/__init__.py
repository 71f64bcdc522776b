"""Pipeloom: plans, emulates and runs pipeline-parallel training of unequal models on unequal data.

The names below are the public ones. They are imported when first used, so that ``import pipeloom`` costs
nothing and planning needs neither torch nor the kernels before they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.lazy import lazy_names

if TYPE_CHECKING:
    from pipeloom.arrange import ModulePlacement, separate
    from pipeloom.errors import InfeasibleError, InputError, PipeloomError
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
    from pipeloom.packing import PackingSpec
    from pipeloom.planner import Planner, Setup
    from pipeloom.runtime import (
        Checkpoints,
        Model,
        Module,
        Part,
        Prefetched,
        Size,
        TcpPlanStore,
        Trainer,
        launch,
        profile_model,
    )
    from pipeloom.search import Deadline, Solution, solve
    from pipeloom.spec import Chunk, ClusterSpec, Layout
    from pipeloom.taskgraph import TaskGraph, make_graph
    from pipeloom.timeline import LowerBound, Schedule, Timeline, check, lower_bound, simulate

__version__ = "0.1.0"

_HOME = {
    "Checkpoints": "pipeloom.runtime",
    "Chunk": "pipeloom.spec",
    "ClusterSpec": "pipeloom.spec",
    "Deadline": "pipeloom.search",
    "InfeasibleError": "pipeloom.errors",
    "InputError": "pipeloom.errors",
    "Layout": "pipeloom.spec",
    "LowerBound": "pipeloom.timeline",
    "Model": "pipeloom.runtime",
    "Module": "pipeloom.runtime",
    "ModulePlacement": "pipeloom.arrange",
    "PackingSpec": "pipeloom.packing",
    "Part": "pipeloom.runtime",
    "PipeloomError": "pipeloom.errors",
    "Planner": "pipeloom.planner",
    "Prefetched": "pipeloom.runtime",
    "Schedule": "pipeloom.timeline",
    "Setup": "pipeloom.planner",
    "Size": "pipeloom.runtime",
    "Solution": "pipeloom.search",
    "TaskGraph": "pipeloom.taskgraph",
    "TcpPlanStore": "pipeloom.runtime",
    "Timeline": "pipeloom.timeline",
    "Trainer": "pipeloom.runtime",
    "check": "pipeloom.timeline",
    "launch": "pipeloom.runtime",
    "load": "pipeloom.io",
    "lower_bound": "pipeloom.timeline",
    "make_graph": "pipeloom.taskgraph",
    "profile_model": "pipeloom.runtime",
    "read_instance": "pipeloom.io",
    "read_layout": "pipeloom.io",
    "read_samples": "pipeloom.io",
    "read_schedule": "pipeloom.io",
    "separate": "pipeloom.arrange",
    "simulate": "pipeloom.timeline",
    "solve": "pipeloom.search",
    "write_instance": "pipeloom.io",
    "write_layout": "pipeloom.io",
    "write_schedule": "pipeloom.io",
}
"""Where each public name lives."""

__getattr__, __dir__ = lazy_names(__name__, _HOME)

__all__ = [
    "Checkpoints",
    "Chunk",
    "ClusterSpec",
    "Deadline",
    "InfeasibleError",
    "InputError",
    "Layout",
    "LowerBound",
    "Model",
    "Module",
    "ModulePlacement",
    "PackingSpec",
    "Part",
    "PipeloomError",
    "Planner",
    "Prefetched",
    "Schedule",
    "Setup",
    "Size",
    "Solution",
    "TaskGraph",
    "TcpPlanStore",
    "Timeline",
    "Trainer",
    "__version__",
    "check",
    "launch",
    "load",
    "lower_bound",
    "make_graph",
    "profile_model",
    "read_instance",
    "read_layout",
    "read_samples",
    "read_schedule",
    "separate",
    "simulate",
    "solve",
    "write_instance",
    "write_layout",
    "write_schedule",
]
