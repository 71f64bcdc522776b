"""Costs of modules whose instances are dealt to the tensor-parallel ranks of a pipeline rank (`Layout.dealt`).

A chunk of such a module takes as long, and holds as much, as it does on the rank with the largest share, undivided; and
it ends with handing all rows to all of these ranks, as its backward ends with handing the gradients of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from pipeloom.cost.model import CostModel, PassBytes, StrategyCost, between_s
from pipeloom.spec import Chunk, LayerSpec, Layout, ModelSpec, Workload


@runtime_checkable
class DividedCosts(Protocol):
    """Costs that know what tensor parallelism does to layers, and so have ``undivided`` ones.

    Others are of layers that no rank divides.
    """

    @property
    def num_tensor(self) -> int:
        """Devices that share a layer."""
        ...


def _undivided(costs: CostModel) -> CostModel:
    """The same costs, of layers that lie whole on a device."""
    if not isinstance(costs, DividedCosts):
        return costs
    # Not of the protocol: asking whether it is there would make it.
    whole: CostModel = costs.undivided  # type: ignore[attr-defined]
    return whole


def laid_out(costs: CostModel, layout: Layout) -> CostModel:
    """Return costs under a layout: of modules that it deals, those of the largest share."""
    tensor = tensor_degree(costs, layout) if layout.dealt else 1
    return DealtCosts(costs, layout.dealt, tensor) if tensor > 1 else costs


def tensor_degree(costs: CostModel, layout: Layout) -> int:
    """How many devices share the work of a pipeline rank."""
    return costs.num_tensor if isinstance(costs, DividedCosts) else layout.parallelism.tensor


def dealt_sum_s(layout: Layout, model: ModelSpec, costs: CostModel, layer_bytes: Callable[[LayerSpec], int]) -> float:
    """Seconds to add up the gradients of dealt modules over the tensor-parallel ranks, on the rank with most of them.

    Parameters
    ----------
    layer_bytes : callable
        Of a layer's gradients.
    """
    tensor = tensor_degree(costs, layout) if layout.dealt else 1
    if tensor == 1:
        return 0.0
    held = [0] * layout.num_ranks
    for chunk in layout.chunks:
        if chunk.module in layout.dealt and not layout.module(chunk.module).frozen:
            layers = model.module(chunk.module).flat_layers[chunk.layers[0] : chunk.layers[1] + 1]
            held[chunk.rank] += sum(map(layer_bytes, layers))
    each = (between_s(costs, n // tensor, rank, rank) if n else 0.0 for rank, n in enumerate(held))
    return 2 * (tensor - 1) * max(each)


@lru_cache(maxsize=16384)
def _largest_share(workload: Workload, num_ranks: int) -> Workload:
    """Remembered, since every chunk asks for it, and layouts are many."""
    return workload.largest_share(num_ranks)


class DealtCosts:
    """Costs of others, but for some modules.

    What is handed inside a rank goes over the link from a rank to itself, as fast as ranks on one host are joined.

    Parameters
    ----------
    costs : CostModel
    names : collection of str
        Of the dealt modules.
    num_ranks : int
        Tensor-parallel ranks that share a pipeline rank.
    """

    def __init__(self, costs: CostModel, names: frozenset[str], num_ranks: int) -> None:
        self.costs, self.names, self.num_ranks = costs, names, num_ranks
        self.whole: Any = _undivided(costs) if names else costs
        self._handed: dict[tuple[int, float, float], tuple[tuple[StrategyCost, ...], tuple[StrategyCost, ...]]] = {}

    @property
    def split_backward(self) -> bool:
        """Whether the halves of backwards are known."""
        return self.costs.split_backward

    @property
    def slowness(self) -> Sequence[float]:
        """Per rank, how many times longer it computes than most."""
        return self.costs.slowness

    def _at(self, chunk: Chunk, workload: Workload) -> tuple[Any, Workload]:
        """Whom to ask, and about what."""
        if chunk.module in self.names:
            return self.whole, _largest_share(workload, self.num_ranks)
        return self.costs, workload

    def _hand_s(self, chunk: Chunk, workload: Workload) -> float:
        """Seconds in which each rank gets the rows of all others: pieces of one size, that of the largest."""
        share = _largest_share(workload, self.num_ranks)
        piece = self.whole.boundary_bytes(chunk, share)
        return (self.num_ranks - 1) * between_s(self.costs, piece, chunk.rank, chunk.rank)

    def computed(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        """Costs of a chunk without what is handed inside the rank."""
        costs, share = self._at(chunk, workload)
        found: tuple[StrategyCost, ...] = costs.chunk_costs(chunk, share)
        return found

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        """Costs of a chunk on a workload, one per strategy."""
        if chunk.module not in self.names:
            return self.costs.chunk_costs(chunk, workload)
        found = self.computed(chunk, workload)
        forward_s = self._hand_s(chunk, workload)
        first = chunk.layers[0]
        # What other modules give the first layer is seldom trained, and small.
        backward_s = self._hand_s(Chunk(chunk.module, (first - 1, first - 1), chunk.rank), workload) if first else 0.0
        # Chunks of the same layers get the same answer, which is one object, and so is what is made of it.
        key = (id(found), forward_s, backward_s)
        if key not in self._handed:
            made = tuple(
                replace(
                    each,
                    forward_s=each.forward_s + forward_s,
                    backward_s=each.backward_s + backward_s,
                    backward_input_s=None if each.backward_input_s is None else each.backward_input_s + backward_s,
                )
                for each in found
            )
            self._handed[key] = found, made
        return self._handed[key][1]

    def _handed_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Most that gathering takes, of outputs or of gradients of inputs.

        Pieces of all ranks, as large as the largest, one that is sent, and all put together.
        """
        if chunk.module not in self.names:
            return 0
        share, first = _largest_share(workload, self.num_ranks), chunk.layers[0]
        ends = [chunk, *([Chunk(chunk.module, (first - 1, first - 1), chunk.rank)] if first else [])]

        def handed(end: Chunk) -> int:
            piece, rows = (int(self.whole.boundary_bytes(end, each)) for each in (share, workload))
            return (self.num_ranks + 1) * piece + rows

        return max(map(handed, ends))

    def workspace_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Most that a pass uses beyond what is held."""
        costs, share = self._at(chunk, workload)
        return int(costs.workspace_bytes(chunk, share)) + self._handed_bytes(chunk, workload)

    def staging_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """What it uses more under strategies that offload."""
        costs, share = self._at(chunk, workload)
        return int(costs.staging_bytes(chunk, share))

    def pass_bytes(self, chunk: Chunk, workload: Workload, strategy: str) -> PassBytes:
        """What a pass uses beyond what is held, under one strategy."""
        costs, share = self._at(chunk, workload)
        found: PassBytes = costs.pass_bytes(chunk, share, strategy)
        more = self._handed_bytes(chunk, workload)
        return found._replace(
            forward_bytes=found.forward_bytes + more,
            backward_bytes=found.backward_bytes + more,
            first_half_bytes=found.first_half_bytes + more,
        )

    def gradient_bytes(self, chunk: Chunk) -> int:
        """Of the static bytes, those of gradients."""
        costs: Any = self._at(chunk, Workload(()))[0]
        return int(costs.gradient_bytes(chunk))

    def static_bytes(self, chunk: Chunk) -> int:
        """Bytes of weights, gradients and optimiser state on one device: of dealt modules, whole."""
        return int(self._at(chunk, Workload(()))[0].static_bytes(chunk))

    def boundary_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Bytes of the chunk's output as it goes to another rank: of all instances."""
        return self.costs.boundary_bytes(chunk, workload)

    def stream_bytes(self, stream: str, workload: Workload) -> int:
        """Bytes of a stream."""
        return self.costs.stream_bytes(stream, workload)

    def link_between(self, first: int, second: int) -> int:
        """Number of the link between two ranks."""
        return self.costs.link_between(first, second)

    def transfer_s(self, num_bytes: int, link: int = 0) -> float:
        """Seconds of a message over a link."""
        return self.costs.transfer_s(num_bytes, link)
