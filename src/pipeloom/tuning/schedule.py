"""Convert a tuning result into a `Packing`, `TaskGraph` and `Schedule`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeloom.cost import CostModel
from pipeloom.packing import Packing, packing_of
from pipeloom.spec import Batch
from pipeloom.taskgraph import NO_TASK, TaskGraph, build_graph
from pipeloom.timeline import Schedule
from pipeloom.tuning.kernels.one_f_one_b import BACKWARD, ENCODE, FORWARD
from pipeloom.tuning.pipeline import TunedPipeline
from pipeloom.tuning.tune import TuningResult


@dataclass(frozen=True, slots=True)
class TunedPlan:
    """A tuned batch as a task graph with a schedule, for `simulate`, `check` and `lower`."""

    packing: Packing
    graph: TaskGraph
    schedule: Schedule


def tuned_plan(
    pipeline: TunedPipeline, batch: Batch, tuned: TuningResult, costs: CostModel, capacity_bytes: int | None = None
) -> TunedPlan:
    """Build the graph and schedule of a tuned batch. Embeddings are held from encoder to backbone.

    Parameters
    ----------
    batch : Batch
        The tuned batch.
    costs : CostModel
        Costs of the tasks in the graph. `tune` uses a table of these costs.
    capacity_bytes : int or None
        Memory of each rank in the graph. None: no limit.
    """
    packing = packing_of(batch, pipeline.model, pipeline.layout, tuned.groups)
    graph = build_graph(
        pipeline.layout,
        packing,
        costs,
        name=f"iteration {batch.iteration}",
        capacity_bytes=capacity_bytes,
        hold_outputs=True,
    )
    return TunedPlan(packing, graph, _schedule(pipeline, graph, tuned))


def _schedule(pipeline: TunedPipeline, graph: TaskGraph, tuned: TuningResult) -> Schedule:
    """Return 1F1B in the order of the packing, with encoder parts on the first rank as tuned."""
    assert graph.labels is not None
    layout = pipeline.layout
    num_microbatches, num_ranks = len(tuned.groups), layout.num_ranks
    stage_of = {chunk: p for p, chunk in enumerate(layout.chunks_of(layout.modules[-1].name))}
    stage: dict[tuple[int, int], int] = {}
    part_of: dict[tuple[int, int, int], list[int]] = {}
    for pair, label in enumerate(graph.labels):
        if label.chunk in stage_of:
            stage[stage_of[label.chunk], label.microbatch] = pair
        else:
            module = layout.chunks[label.chunk].module
            order = [m.name for m in layout.modules].index(module)
            part_of.setdefault((label.microbatch, order, label.sub_microbatch), []).append(pair)
    parts = [part_of[key] for key in sorted(part_of)]
    forward, backward = graph.forward_of.tolist(), graph.backward_of.tolist()
    first: list[int] = []
    for kind, number in tuned.events.tolist():
        if kind == ENCODE:
            first += [forward[pair] for pair in parts[number]]
        elif kind == FORWARD:
            first.append(forward[stage[0, number]])
        elif kind == BACKWARD:
            first.append(backward[stage[0, number]])
        else:
            first += [backward[pair] for pair in reversed(parts[number])]
    orders = [first]
    for p in range(1, num_ranks):
        ahead = num_ranks - 1 - p + tuned.extra
        tasks: list[int] = []
        for i in range(num_microbatches + ahead + 1):
            if 0 <= i - ahead - 1 < num_microbatches:
                tasks.append(backward[stage[p, i - ahead - 1]])
            if i < num_microbatches:
                tasks.append(forward[stage[p, i]])
        orders.append([task for task in tasks if task != NO_TASK])
    candidate = None if graph.candidates is None else np.zeros(graph.num_pairs, np.int64)
    return Schedule(tuple(np.array(tasks, np.int64) for tasks in orders), candidate, "tuned 1f1b")
