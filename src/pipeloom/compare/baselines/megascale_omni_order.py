"""MegaScale-Omni's joint pipeline: every rank encodes a group of microbatches before the backbone needs it.

From the abstract of "MegaScale-Omni: A Hyper-Scale, Workload-Resilient System for MultiModal LLM Training in
Production" (arXiv 2605.08962, EuroSys 2026): encoders and language model share all ranks and run in one joint pipeline
whose idle time does not grow with the encoders' share of the work. There is no public code, and the exact order of
passes is unknown. Assumption: all ranks encode a group of microbatches together right before the backbone's first pass
of the group, and run their backwards right after its last pass. The backbone runs interleaved 1F1B. One group of all
microbatches is Optimus' coarse order.
"""

from __future__ import annotations

import numpy as np

from pipeloom.compare.baselines.optimus_orders import backbone_alone, optimus_coarse
from pipeloom.errors import check_count
from pipeloom.search.stage_chain import as_schedule
from pipeloom.taskgraph import FORWARD, TaskGraph
from pipeloom.timeline import Schedule, running_order


def joint_pipeline(graph: TaskGraph, group_size: int) -> Schedule:
    """Put the encoders' passes of every group of microbatches around the backbone's passes of that group.

    Parameters
    ----------
    graph : TaskGraph
        Graph of a layout whose last module is the backbone, usually with whole encoders on every rank.
    group_size : int
        Number of microbatches that are encoded together.

    Raises
    ------
    InputError
        The graph has no labels or only one module, or groups are empty.
    """
    check_count("group_size", group_size)
    coarse = optimus_coarse(graph)
    encodes = graph.module != len(graph.module_names) - 1
    place = np.empty(graph.num_tasks, np.int64)
    place[running_order(graph, coarse)] = np.arange(graph.num_tasks)
    start = backbone_alone(graph, coarse)
    group = graph.microbatch // group_size
    forward = graph.kind == FORWARD
    end = start + graph.duration_ns
    for number in range(int(group.max()) + 1):
        mine = group == number
        start[mine & encodes & forward] = start[mine & ~encodes].min()
        start[mine & encodes & ~forward] = end[mine & ~encodes].max()
    # Both start times and places respect every edge, so the orders do too.
    listed = np.lexsort((place, start))
    order = [listed[graph.rank[listed] == rank].tolist() for rank in range(graph.num_ranks)]
    return as_schedule(graph, order, "joint pipeline")
