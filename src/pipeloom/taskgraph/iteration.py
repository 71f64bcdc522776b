"""Task graph of one iteration under memory limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeloom.cost import CostModel, rank_static_bytes
from pipeloom.cost.encoder_dp import costs_under_layout
from pipeloom.errors import InfeasibleError
from pipeloom.packing import Packing
from pipeloom.spec import Chunk, Layout, RankSpec, Workload
from pipeloom.taskgraph.assignment import Assignable
from pipeloom.taskgraph.build import build_assignable
from pipeloom.taskgraph.columns import IntArray
from pipeloom.taskgraph.graph import TaskGraph
from pipeloom.units import size_text


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Memory of every rank, and the part of it reserved for the running computation.

    Attributes
    ----------
    capacity_bytes : int or None
        Memory of each rank; None: no limit.
    num_messages : int
        Outputs reserved for beside each computation: those that arrived early and those not yet consumed. Their real
        number depends on the speed of the ranks.
    host_bytes : int or None
        Host memory that each rank may fill with offloaded activations; None: no limit.
    even : bool
        Reserve as much on every rank as on the rank that needs most.
    reserve_bytes : tuple of int
        Additional reserve of each rank, for plans that need more than the estimate. Empty: nothing.
    """

    capacity_bytes: int | None = None
    num_messages: int = 4
    even: bool = False
    host_bytes: int | None = None
    reserve_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, cluster: RankSpec) -> MemoryLimit:
        """Return the memory of a cluster's ranks and of their hosts."""
        return cls(cluster.memory_capacity_bytes, host_bytes=cluster.host_capacity_bytes)

    def with_reserve(self, more: Sequence[int]) -> MemoryLimit:
        """Return the same with a larger reserve: ``more`` bytes per rank."""
        reserve = self.reserve_bytes or (0,) * len(more)
        return replace(self, reserve_bytes=tuple(a + b for a, b in zip(reserve, more, strict=True)))


def iteration_graph(
    layout: Layout,
    packed: Packing,
    costs: CostModel,
    name: str,
    memory: MemoryLimit | None = None,
    *,
    or_whole: bool = True,
) -> Assignable:
    """Make the task graph of an iteration under a memory limit, less the workspace of the largest computation.

    If the costs offer several strategies or split backwards, all of them are candidates of every pair. Sub-microbatches
    of replicated modules can be assigned to other ranks.

    Parameters
    ----------
    memory : MemoryLimit or None
        None: no limit.
    or_whole : bool
        If backwards may be split, also offer every strategy with a whole backward; False: split all of them.

    Raises
    ------
    InfeasibleError
        Weights, gradients, optimizer state and one computation do not fit.
    """
    memory = memory or MemoryLimit()
    capacity = staged = None
    if memory.capacity_bytes is not None:
        work, more = _reserve_bytes(layout, packed, costs, memory)
        static = rank_static_bytes(costs_under_layout(costs, layout), layout)
        capacity, staged = _capacity_bytes(static, work, memory), more if more.any() else None
    assignable = build_assignable(
        layout,
        packed,
        costs,
        name=name,
        capacity_bytes=capacity,
        backward="whole" if not costs.split_backward else "either" if or_whole else "split",
    )
    host = None if memory.host_bytes is None else np.full(layout.num_ranks, memory.host_bytes, np.int64)
    return assignable.within(capacity, host, staged)


def headroom_bytes(
    graph: TaskGraph, layout: Layout, packed: Packing, costs: CostModel, memory: MemoryLimit
) -> IntArray | None:
    """Return the bytes of each rank for static memory and pairs if no pair offloads; None: no limit.

    Raises
    ------
    InfeasibleError
        Weights, gradients, optimizer state and one computation do not fit.
    """
    if memory.capacity_bytes is None:
        return None
    return _capacity_bytes(graph.static_bytes, _reserve_bytes(layout, packed, costs, memory)[0], memory)


def _capacity_bytes(static_bytes: IntArray, work: IntArray, memory: MemoryLimit) -> IntArray:
    assert memory.capacity_bytes is not None
    left: IntArray = memory.capacity_bytes - work - np.array(memory.reserve_bytes or 0, np.int64)
    if (static_bytes > left).any():
        rank = int((static_bytes - left).argmax())
        capacity = memory.capacity_bytes
        static, reserved, most = map(size_text, (int(static_bytes[rank]), int(capacity - left[rank]), capacity))
        raise InfeasibleError(
            f"rank {rank}: weights, gradients and optimizer state take {static}, the largest computation with its "
            f"messages {reserved}, of {most}; use more ranks, more tensor or data parallelism, or smaller microbatches"
        )
    return left


def _reserve_bytes(layout: Layout, packed: Packing, costs: CostModel, memory: MemoryLimit) -> tuple[IntArray, IntArray]:
    """Return the reserve of every rank, and the addition if it offloads; each of shape (num_ranks,)."""
    most = workspace_bytes(layout, packed, costs, memory.num_messages)
    if memory.even:
        most[:] = most.max(axis=1, keepdims=True)
    return most[0], most[1] - most[0]


def _size_by_tokens(workload: Workload) -> tuple[Any, ...]:
    # The other features decide between equal ones, so that the order of the packing does not.
    return workload.num_tokens, workload.num_instances, workload.num_token_pairs, workload.given, workload.lengths


def _size_by_pairs(workload: Workload) -> tuple[Any, ...]:
    return workload.num_token_pairs, workload.num_tokens, workload.num_instances, workload.given, workload.lengths


def workspace_bytes(layout: Layout, packed: Packing, costs: CostModel, num_messages: int) -> IntArray:
    """Return the largest workspace of any computation, with ``num_messages`` of its inputs or outputs.

    The shape is (2, num_ranks). Row 0 is under strategies without offloading; row 1 adds what offloading stages.
    """
    most, costs = np.zeros((2, layout.num_ranks), np.int64), costs_under_layout(costs, layout)
    for column, module in enumerate(layout.modules):
        parts = [part.workload for microbatch in packed.microbatches for part in microbatch.parts[column]]
        if not parts:
            continue
        # Bytes grow with both features, so one of these workloads needs the most, or nearly.
        largest = {max(parts, key=_size_by_tokens), max(parts, key=_size_by_pairs)}
        for number in layout.chunks_of(module.name):
            chunk = layout.chunks[number]
            for workload in largest:
                used = costs.workspace_bytes(chunk, workload)
                if num_messages:
                    used += num_messages * _message_bytes(chunk, workload, costs)
                both = used, used + costs.staging_bytes(chunk, workload)
                most[:, chunk.rank] = np.maximum(most[:, chunk.rank], both)
    return most


def _message_bytes(chunk: Chunk, workload: Workload, costs: CostModel) -> int:
    """Return the bytes of a chunk's output or of its input from its own module, whichever is larger."""
    first = chunk.layers[0]
    ends = [chunk] if first == 0 else [chunk, Chunk(chunk.module, (first - 1, first - 1), chunk.rank)]
    return max(costs.boundary_bytes(end, workload) for end in ends)
