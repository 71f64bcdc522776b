"""TaskGraph: tasks with their rank, seconds, bytes, and what comes before."""

from pipeloom.taskgraph.build import build_graph, to_ns
from pipeloom.taskgraph.graph import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    KIND_NAMES,
    NO_TASK,
    NS_PER_S,
    WEIGHT_GRADIENT,
    Candidate,
    IntArray,
    PairLabel,
    Task,
    TaskGraph,
    make_graph,
    topological_order,
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
    "IntArray",
    "PairLabel",
    "Task",
    "TaskGraph",
    "build_graph",
    "make_graph",
    "to_ns",
    "topological_order",
]
