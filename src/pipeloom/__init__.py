"""Pipeloom: plans, emulates and runs pipeline-parallel training of unequal models on unequal data.

The names below are the public ones. They are imported when first used, so that ``import pipeloom`` costs
nothing and planning needs neither torch nor the kernels before they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from pipeloom.taskgraph import TaskGraph, make_graph
    from pipeloom.timeline import LowerBound, Schedule, Timeline

__version__ = "0.1.0"

_HOME = {
    "InfeasibleError": "pipeloom.errors",
    "InputError": "pipeloom.errors",
    "LowerBound": "pipeloom.timeline",
    "PipeloomError": "pipeloom.errors",
    "Schedule": "pipeloom.timeline",
    "TaskGraph": "pipeloom.taskgraph",
    "Timeline": "pipeloom.timeline",
    "load": "pipeloom.io",
    "make_graph": "pipeloom.taskgraph",
    "read_instance": "pipeloom.io",
    "read_layout": "pipeloom.io",
    "read_samples": "pipeloom.io",
    "read_schedule": "pipeloom.io",
    "write_instance": "pipeloom.io",
    "write_layout": "pipeloom.io",
    "write_schedule": "pipeloom.io",
}
"""Where each public name lives."""

__all__ = [
    "InfeasibleError",
    "InputError",
    "LowerBound",
    "PipeloomError",
    "Schedule",
    "TaskGraph",
    "Timeline",
    "__version__",
    "load",
    "make_graph",
    "read_instance",
    "read_layout",
    "read_samples",
    "read_schedule",
    "write_instance",
    "write_layout",
    "write_schedule",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'pipeloom' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, whether imported yet or not."""
    return sorted(__all__)
