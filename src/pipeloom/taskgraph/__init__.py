"""TaskGraph: tasks with their rank, seconds, bytes, and what comes before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.lazy import lazy_names
from pipeloom.taskgraph.candidates import Candidate
from pipeloom.taskgraph.dealing import Dealable, with_delays
from pipeloom.taskgraph.graph import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    KIND_NAMES,
    NO_TASK,
    NS_PER_S,
    WEIGHT_GRADIENT,
    IntArray,
    PairLabel,
    Task,
    TaskGraph,
    make_graph,
    topological_order,
)

if TYPE_CHECKING:
    from pipeloom.taskgraph.build import build_dealable, build_graph, to_ns

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "build_dealable": ".build",
        "build_graph": ".build",
        "to_ns": ".build",
    },
)

__all__ = [
    "BACKWARD",
    "FORWARD",
    "INPUT_GRADIENT",
    "KIND_NAMES",
    "NO_TASK",
    "NS_PER_S",
    "WEIGHT_GRADIENT",
    "Candidate",
    "Dealable",
    "IntArray",
    "PairLabel",
    "Task",
    "TaskGraph",
    "build_dealable",
    "build_graph",
    "make_graph",
    "to_ns",
    "topological_order",
    "with_delays",
]
