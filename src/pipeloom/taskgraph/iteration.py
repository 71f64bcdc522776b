"""The task graph of one iteration under a rank's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeloom.cost import CostModel
from pipeloom.cost.dealt import laid_out
from pipeloom.errors import InfeasibleError
from pipeloom.packing import Packing
from pipeloom.spec import Layout
from pipeloom.taskgraph.assignment import Assignable
from pipeloom.taskgraph.build import build_assignable
from pipeloom.taskgraph.columns import IntArray
from pipeloom.taskgraph.graph import TaskGraph
from pipeloom.units import size_text


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
    spare_bytes : tuple of int
        Per rank, put aside beside all that: what a plan was found to need more than this. Empty: nothing.
    """

    capacity_bytes: int | None = None
    num_messages: int = 4
    even: bool = False
    host_bytes: int | None = None
    spare_bytes: tuple[int, ...] = ()

    def sparing(self, more: Sequence[int]) -> MemoryLimit:
        """Return the same with so much more put aside on every rank."""
        spare = self.spare_bytes or (0,) * len(more)
        return replace(self, spare_bytes=tuple(a + b for a, b in zip(spare, more, strict=True)))


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
    ranks = made.graph.num_ranks
    host = None if memory.host_bytes is None else np.full(ranks, memory.host_bytes, np.int64)
    if memory.capacity_bytes is None:
        return made.within(None, host)
    work, staged = put_aside(layout, packed, costs, memory)
    room = _room_bytes(made.graph, work, memory)
    return made.within(room, host, staged if staged.any() else None)


def room_bytes(
    graph: TaskGraph, layout: Layout, packed: Packing, costs: CostModel, memory: MemoryLimit
) -> IntArray | None:
    """Bytes that each rank has for what is static and what pairs hold, if none offloads; None: no limit.

    Raises
    ------
    InfeasibleError
        Weights, gradients, optimiser state and one computation do not fit.
    """
    if memory.capacity_bytes is None:
        return None
    return _room_bytes(graph, put_aside(layout, packed, costs, memory)[0], memory)


def _room_bytes(graph: TaskGraph, work: IntArray, memory: MemoryLimit) -> IntArray:
    assert memory.capacity_bytes is not None
    room: IntArray = memory.capacity_bytes - work - np.array(memory.spare_bytes or 0, np.int64)
    if (graph.static_bytes > room).any():
        rank = int((graph.static_bytes - room).argmax())
        capacity = memory.capacity_bytes
        static, aside, most = map(size_text, (int(graph.static_bytes[rank]), int(capacity - room[rank]), capacity))
        raise InfeasibleError(
            f"rank {rank}: weights, gradients and optimiser state take {static}, the largest computation with its "
            f"messages {aside}, of {most}; use more ranks, more tensor or data parallelism, or smaller microbatches"
        )
    return room


def put_aside(layout: Layout, packed: Packing, costs: CostModel, memory: MemoryLimit) -> tuple[IntArray, IntArray]:
    """What every rank puts aside for a computation, and how much more where it offloads; each of shape (num_ranks,)."""
    most = workspace_bytes(layout, packed, costs, memory.num_messages)
    if memory.even:
        most[:] = most.max(axis=1, keepdims=True)
    return most[0], most[1] - most[0]


def workspace_bytes(layout: Layout, packed: Packing, costs: CostModel, num_messages: int) -> IntArray:
    """Most that a computation uses beyond what is held, with room for so many of its outputs.

    Shape (2, num_ranks): under strategies that do not offload; and under all, with what offloading stages.
    """
    most, costs = np.zeros((2, layout.num_ranks), np.int64), laid_out(costs, layout)
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
                both = used, used + costs.staging_bytes(chunk, workload)
                most[:, chunk.rank] = np.maximum(most[:, chunk.rank], both)
    return most
