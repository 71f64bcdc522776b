"""The task graph of one iteration under a rank's memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeloom.cost import CostModel
from pipeloom.errors import InfeasibleError
from pipeloom.packing import Packing
from pipeloom.spec import Layout
from pipeloom.taskgraph.assignment import Assignable
from pipeloom.taskgraph.build import build_assignable
from pipeloom.taskgraph.columns import IntArray


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory of every rank, and what of it is put aside for the computation that runs.

    Attributes
    ----------
    capacity_bytes : int or None
        None: no limit.
    num_messages : int
        Outputs that a computation has room for beside itself: those that have come early, and those that nobody has
        taken yet. How many there are is the ranks' real speed.
    host_bytes : int or None
        Of the host's memory, what each rank may fill with offloaded activations; None: no limit.
    even : bool
        Every rank puts aside as much as the one that needs most.
    """

    capacity_bytes: int | None = None
    num_messages: int = 4
    even: bool = False
    host_bytes: int | None = None


def iteration_graph(
    layout: Layout,
    packed: Packing,
    costs: CostModel,
    name: str,
    memory: MemoryLimit | None = None,
    *,
    or_whole: bool = True,
) -> Assignable:
    """Task graph of an iteration under a rank's memory, less what any one computation needs while it runs.

    Where the costs offer several strategies, or split backwards, all of them are candidates of every pair. Parts of
    replicated modules can be assigned to ranks anew.

    Parameters
    ----------
    layout : Layout
    packed : Packing
    costs : CostModel
    name : str
    memory : MemoryLimit or None
        None: no limit.
    or_whole : bool
        Where backwards may be split, offer every strategy with a whole one too; False: all are split.

    Raises
    ------
    InfeasibleError
        Weights, gradients, optimiser state and one computation do not fit.
    """
    memory = memory or MemoryLimit()
    made = build_assignable(
        layout,
        packed,
        costs,
        name=name,
        capacity_bytes=memory.capacity_bytes,
        backward="whole" if not costs.split_backward else "either" if or_whole else "split",
    )
    graph = made.graph
    host = None if memory.host_bytes is None else np.full(graph.num_ranks, memory.host_bytes, np.int64)
    if graph.capacity_bytes is None:
        return made.within(None, host)
    work = workspace_bytes(layout, packed, costs, memory.num_messages)
    room = graph.capacity_bytes - (work.max() if memory.even else work)
    if (graph.static_bytes > room).any():
        rank = int((graph.static_bytes - room).argmax())
        raise InfeasibleError(
            f"rank {rank}: weights, gradients and optimiser state take {graph.static_bytes[rank]} bytes, the largest "
            f"computation {graph.capacity_bytes[rank] - room[rank]}, of {graph.capacity_bytes[rank]}; use more ranks, "
            "more tensor or data parallelism, or smaller microbatches"
        )
    return made.within(room, host)


def workspace_bytes(layout: Layout, packed: Packing, costs: CostModel, num_messages: int) -> IntArray:
    """Most that a computation uses beyond what is held, with room for so many of its outputs, shape (num_ranks,)."""
    most = np.zeros(layout.num_ranks, np.int64)
    for column, module in enumerate(layout.modules):
        parts = {part.workload for microbatch in packed.microbatches for part in microbatch.parts[column]}
        if not parts:
            continue
        # Bytes rise with each of the features, so one of these has the most, or nearly so.
        largest = {max(parts, key=lambda w: w.num_tokens), max(parts, key=lambda w: w.num_token_pairs)}
        for number in layout.chunks_of(module.name):
            chunk = layout.chunks[number]
            for workload in largest:
                used = costs.workspace_bytes(chunk, workload)
                if num_messages:
                    used += num_messages * costs.boundary_bytes(chunk, workload)
                most[chunk.rank] = max(most[chunk.rank], used)
    return most
