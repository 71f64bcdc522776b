"""Costs of modules with encoder data parallelism over tensor ranks (`Layout.encoder_dp_modules`).

A chunk of such a module takes as much time and memory as whole layers on the rank with the largest share. Its forward
ends with an all-gather of all rows among these ranks, and its backward with an all-gather of the gradients of its
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from pipeloom.cost.model import CostModel, PassBytes, StrategyCost, between_s, static_bytes_together
from pipeloom.spec import Chunk, LayerSpec, Layout, ModelSpec, Workload


@runtime_checkable
class DividedCosts(Protocol):
    """Costs that model tensor parallelism of layers, and therefore have ``undivided`` costs.

    All other costs are of layers that no rank divides.
    """

    @property
    def num_tensor(self) -> int:
        """Number of devices that share a layer."""


def _undivided(costs: CostModel) -> CostModel:
    """Return the same costs for whole layers on one device."""
    if not isinstance(costs, DividedCosts):
        return costs
    # Not in the protocol, because isinstance would compute it.
    whole: CostModel = costs.undivided  # type: ignore[attr-defined]
    return whole


def costs_under_layout(costs: CostModel, layout: Layout) -> CostModel:
    """Return the costs under a layout: modules with encoder data parallelism cost as much as their largest share."""
    tensor = tensor_degree(costs, layout) if layout.encoder_dp_modules else 1
    return EncoderDpCosts(costs, layout.encoder_dp_modules, tensor) if tensor > 1 else costs


def tensor_degree(costs: CostModel, layout: Layout) -> int:
    """Return the number of devices that share the work of a pipeline rank."""
    return costs.num_tensor if isinstance(costs, DividedCosts) else layout.parallelism.tensor


def encoder_dp_reduce_s(
    layout: Layout, model: ModelSpec, costs: CostModel, layer_bytes: Callable[[LayerSpec], int]
) -> float:
    """Return the seconds to sum gradients of encoder-data-parallel modules over tensor ranks, on the slowest rank.

    ``layer_bytes`` returns the bytes of a layer's gradients.
    """
    tensor = tensor_degree(costs, layout) if layout.encoder_dp_modules else 1
    if tensor == 1:
        return 0.0
    held = [0] * layout.num_ranks
    for chunk in layout.chunks:
        if chunk.module in layout.encoder_dp_modules and not layout.module(chunk.module).frozen:
            layers = model.module(chunk.module).flat_layers[chunk.layers[0] : chunk.layers[1] + 1]
            held[chunk.rank] += sum(map(layer_bytes, layers))
    each = (between_s(costs, n // tensor, rank, rank) if n else 0.0 for rank, n in enumerate(held))
    return 2 * (tensor - 1) * max(each)


@lru_cache(maxsize=16384)
def _largest_share(workload: Workload, num_ranks: int) -> Workload:
    """Return the largest share of a workload. Cached, because costs of all chunks in all layouts need it."""
    return workload.largest_share(num_ranks)


class EncoderDpCosts:
    """Costs that change those of some modules to encoder data parallelism.

    Messages within a rank use the link from a rank to itself, which is as fast as between ranks of one host.

    Parameters
    ----------
    names : collection of str
        Modules with encoder data parallelism.
    num_ranks : int
        Tensor-parallel ranks of a pipeline rank.
    """

    def __init__(self, costs: CostModel, names: frozenset[str], num_ranks: int) -> None:
        self.costs, self.names, self.num_ranks = costs, names, num_ranks
        self.whole: Any = _undivided(costs) if names else costs
        self._gathered: dict[tuple[int, float, float], tuple[tuple[StrategyCost, ...], tuple[StrategyCost, ...]]] = {}

    @property
    def split_backward(self) -> bool:
        """Whether backwards can be split."""
        return self.costs.split_backward

    @property
    def slowness(self) -> Sequence[float]:
        """Compute time of each rank relative to most ranks."""
        return self.costs.slowness

    def _at(self, chunk: Chunk, workload: Workload) -> tuple[Any, Workload]:
        """Return the costs and the workload that apply to a chunk."""
        if chunk.module in self.names:
            return self.whole, _largest_share(workload, self.num_ranks)
        return self.costs, workload

    def _gather_s(self, chunk: Chunk, workload: Workload) -> float:
        """Return the seconds of an all-gather of rows. All pieces are as large as the largest."""
        share = _largest_share(workload, self.num_ranks)
        piece = self.whole.boundary_bytes(chunk, share)
        return (self.num_ranks - 1) * between_s(self.costs, piece, chunk.rank, chunk.rank)

    def computed(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        """Return costs of a chunk without messages within the rank."""
        costs, share = self._at(chunk, workload)
        found: tuple[StrategyCost, ...] = costs.chunk_costs(chunk, share)
        return found

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        """Return the costs of a chunk on a workload, one per strategy."""
        if chunk.module not in self.names:
            return self.costs.chunk_costs(chunk, workload)
        found = self.computed(chunk, workload)
        forward_s = self._gather_s(chunk, workload)
        first = chunk.layers[0]
        # Inputs from other modules are seldom trained, and small.
        backward_s = self._gather_s(Chunk(chunk.module, (first - 1, first - 1), chunk.rank), workload) if first else 0.0
        # Equal chunks get the same object, so results are cached by its identity.
        key = (id(found), forward_s, backward_s)
        if key not in self._gathered:
            made = tuple(
                replace(
                    each,
                    forward_s=each.forward_s + forward_s,
                    backward_s=each.backward_s + backward_s,
                    backward_input_s=None if each.backward_input_s is None else each.backward_input_s + backward_s,
                )
                for each in found
            )
            self._gathered[key] = found, made
        return self._gathered[key][1]

    def _gather_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the peak bytes of an all-gather of outputs or of input gradients.

        It holds pieces of all ranks, as large as the largest, one piece that is sent, and the concatenation.
        """
        if chunk.module not in self.names:
            return 0
        share, first = _largest_share(workload, self.num_ranks), chunk.layers[0]
        ends = [chunk, *([Chunk(chunk.module, (first - 1, first - 1), chunk.rank)] if first else [])]

        def gathered(end: Chunk) -> int:
            piece, rows = (int(self.whole.boundary_bytes(end, each)) for each in (share, workload))
            return (self.num_ranks + 1) * piece + rows

        return max(map(gathered, ends))

    def workspace_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the peak bytes of a pass beyond held activations."""
        costs, share = self._at(chunk, workload)
        return int(costs.workspace_bytes(chunk, share)) + self._gather_bytes(chunk, workload)

    def staging_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the additional peak bytes under strategies that offload."""
        costs, share = self._at(chunk, workload)
        return int(costs.staging_bytes(chunk, share))

    def pass_bytes(self, chunk: Chunk, workload: Workload, strategy: str) -> PassBytes:
        """Return the peak bytes of each pass beyond held activations, under one strategy."""
        costs, share = self._at(chunk, workload)
        found: PassBytes = costs.pass_bytes(chunk, share, strategy)
        more = self._gather_bytes(chunk, workload)
        return found._replace(
            forward_bytes=found.forward_bytes + more,
            backward_bytes=found.backward_bytes + more,
            first_backward_bytes=found.first_backward_bytes + more,
            first_half_bytes=found.first_half_bytes + more,
        )

    def gradient_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of gradients, a part of the static bytes."""
        costs: Any = self._at(chunk, Workload(()))[0]
        return int(costs.gradient_bytes(chunk))

    def static_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of weights, gradients and optimizer state on one device; whole for the changed modules."""
        return self.static_bytes_together([chunk])

    def static_bytes_together(self, chunks: Sequence[Chunk]) -> int:
        """Return the bytes of weights, gradients and optimizer state of all chunks of one rank on one device."""
        changed = [chunk for chunk in chunks if chunk.module in self.names]
        others = [chunk for chunk in chunks if chunk.module not in self.names]
        return static_bytes_together(self.whole, changed) + static_bytes_together(self.costs, others)

    def boundary_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the bytes of the chunk's output in messages to other ranks: of all instances."""
        return self.costs.boundary_bytes(chunk, workload)

    def stream_bytes(self, stream: str, workload: Workload) -> int:
        """Return the bytes of a stream."""
        return self.costs.stream_bytes(stream, workload)

    def link_between(self, first: int, second: int) -> int:
        """Return the number of the link between two ranks."""
        return self.costs.link_between(first, second)

    def transfer_s(self, num_bytes: int, link: int = 0) -> float:
        """Return the seconds of a message over a link."""
        return self.costs.transfer_s(num_bytes, link)
