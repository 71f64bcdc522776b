"""TaskGraph: tasks with their rank, seconds, bytes, and what comes before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.lazy import lazy_names
from pipeloom.limits import MAX_S, MAX_TOTAL
from pipeloom.taskgraph.assignment import Assignable
from pipeloom.taskgraph.candidates import Candidate
from pipeloom.taskgraph.changes import with_delays, with_edges, with_microbatch
from pipeloom.taskgraph.columns import KIND_NAMES, BoolArray, Edges, IntArray, PairLabel, Pairs, Tasks, check_candidates
from pipeloom.taskgraph.graph import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    NO_TASK,
    WEIGHT_GRADIENT,
    Task,
    TaskGraph,
    make_graph,
    topological_order,
)
from pipeloom.totals import NS_PER_S, to_ns

if TYPE_CHECKING:
    from pipeloom.taskgraph.build import build_assignable, build_graph

__getattr__, __dir__ = lazy_names(__name__, __file__)

__all__ = [
    "BACKWARD",
    "FORWARD",
    "INPUT_GRADIENT",
    "KIND_NAMES",
    "MAX_S",
    "MAX_TOTAL",
    "NO_TASK",
    "NS_PER_S",
    "WEIGHT_GRADIENT",
    "Assignable",
    "BoolArray",
    "Candidate",
    "Edges",
    "IntArray",
    "PairLabel",
    "Pairs",
    "Task",
    "TaskGraph",
    "Tasks",
    "build_assignable",
    "build_graph",
    "check_candidates",
    "make_graph",
    "to_ns",
    "topological_order",
    "with_delays",
    "with_edges",
    "with_microbatch",
]
