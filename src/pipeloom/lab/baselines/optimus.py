"""Optimus' coarse-grained schedule: all encoder work before the backbone, its gradients after (`dip.txt` §7.1)."""

from __future__ import annotations

from pipeloom.errors import InputError
from pipeloom.search.stage_chain import as_schedule, chain_of
from pipeloom.search.static_orders import interleaved_orders
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule


def optimus_coarse(graph: TaskGraph) -> Schedule:
    """Run every encoder's forward for all microbatches, then the backbone by 1F1B, then the encoders' backwards.

    The last module is the backbone; its chunks may be interleaved. A rank goes on as soon as its next task is
    ready, so the encoders' work fills the ramps of the backbone's pipeline.

    Raises
    ------
    InputError
        The graph has no labels, or only one module.
    """
    if graph.labels is None:
        raise InputError("graph", "has no labels", "baselines need a graph that was made from a layout")
    if len(graph.module_names) < 2:
        raise InputError("graph", "has one module", "Optimus wants encoders and a backbone")
    encoders, backbone = graph.module_names[:-1], graph.module_names[-1]
    middle = interleaved_orders(chain_of(graph, [backbone]), graph.num_ranks)
    around = chain_of(graph, encoders)
    order: list[list[int]] = []
    for rank in range(graph.num_ranks):
        stages = around.stages_of(rank)
        turns = [(stage, m) for m in range(around.num_microbatches) for stage in stages]
        back = [(stage, m) for m in range(around.num_microbatches) for stage in reversed(stages)]
        ahead = [task for unit in turns for task in around.forward.get(unit, [])]
        behind = [task for unit in back for task in around.backward.get(unit, [])]
        order.append([*ahead, *middle[rank], *behind])
    return as_schedule(graph, order, "optimus coarse")
