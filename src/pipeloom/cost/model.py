"""`CostModel`: seconds and bytes of any chunk on any (sub-)microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from pipeloom.cost.correction import Correction, RankSlowness
from pipeloom.spec import Chunk, Layout, Workload


@dataclass(frozen=True, slots=True)
class StrategyCost:
    """Costs of a chunk on one (sub-)microbatch under one memory strategy.

    ``backward_s`` is the whole backward. ``backward_input_s`` and ``backward_weight_s`` are its parts; if they are
    None, the backward cannot be split. ``host_bytes`` are on the host from forward to backward.
    """

    strategy: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    backward_input_s: float | None = None
    backward_weight_s: float | None = None
    weight_gradient_bytes: int | None = None
    layers: tuple[str, ...] = ()
    host_bytes: int = 0


class PassBytes(NamedTuple):
    """Peak bytes of a chunk's passes on one (sub-)microbatch beyond held activations, under one memory strategy."""

    forward_bytes: int
    """Peak of the forward."""
    backward_bytes: int
    """Peak of a whole backward."""
    first_backward_bytes: int
    """Peak of the chunk's first whole backward, with the gradients of weights that it has allocated by then."""
    first_half_bytes: int
    second_half_bytes: int
    moved_bytes: int
    """Bytes that are on the device until they have moved to the host, and again after they have moved back."""
    leaving_bytes: int = 0
    """Bytes of these that stay on the device until the next offload of the rank, because their copies run beside
    computation."""


def link_table(costs: CostModel, num_ranks: int) -> npt.NDArray[np.int64]:
    """Return the number of the link between any two ranks, shape (num_ranks, num_ranks)."""
    ranks = range(num_ranks)
    return np.array([[costs.link_between(a, b) for b in ranks] for a in ranks], np.int64)


def between_s(costs: CostModel, num_bytes: int, first: int, second: int) -> float:
    """Return the seconds of a message between two ranks."""
    return costs.transfer_s(num_bytes, costs.link_between(first, second))


def rank_static_bytes(costs: CostModel, layout: Layout) -> npt.NDArray[np.int64]:
    """Return the bytes of weights, gradients and optimizer state on every rank, shape (num_ranks,)."""
    chunks: list[list[Chunk]] = [[] for _ in range(layout.num_ranks)]
    for chunk in layout.chunks:
        chunks[chunk.rank].append(chunk)
    return np.array([static_bytes_together(costs, each) for each in chunks], np.int64)


def static_bytes_together(costs: CostModel, chunks: Sequence[Chunk]) -> int:
    """Return the bytes of weights, gradients and optimizer state of all chunks of one rank."""
    if isinstance(costs, JointStaticBytes):
        return costs.static_bytes_together(chunks)
    return sum(map(costs.static_bytes, chunks))


class CostModel(RankSlowness, Protocol):
    """Interface of costs for planning, implemented by a measured profile and by the emulator."""

    @property
    def split_backward(self) -> bool:
        """Whether plans may split backwards."""

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        """Return the costs of a chunk on its rank, one per memory strategy. The first is the base (keep)."""

    def workspace_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the peak bytes of a pass beyond held activations, over all strategies that do not offload.

        If all strategies offload: over all of them, with staging buffers.
        """

    def staging_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the additional peak bytes under strategies that offload, for staging buffers."""

    def boundary_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the bytes of the chunk's output, which the next chunk receives."""

    def stream_bytes(self, stream: str, workload: Workload) -> int:
        """Return the bytes of a stream whose emitting layer has this workload."""

    def link_between(self, first: int, second: int) -> int:
        """Return the number of the link between two ranks. Links are numbered from 0."""

    def transfer_s(self, num_bytes: int, link: int = 0) -> float:
        """Return the seconds of a message over a link."""

    def static_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of the chunk's weights, gradients and optimizer state."""


@runtime_checkable
class JointStaticBytes(Protocol):
    """Costs whose chunks share memory on a rank. For all other costs, static bytes of chunks are added."""

    def static_bytes_together(self, chunks: Sequence[Chunk]) -> int:
        """Return the bytes of weights, gradients and optimizer state of all chunks of one rank."""


class PlannedCosts(CostModel, Protocol):
    """Interface of costs for planners: which choices can be dropped, and corrections from training."""

    @property
    def strategies(self) -> Sequence[object]:
        """Memory strategies of every pair; the first is the base."""

    @property
    def factors(self) -> Mapping[str, tuple[float, float]]:
        """Factors of the seconds of (forward, backward) by module; 1 if absent."""

    def uncorrected(self) -> Self:
        """Return the same costs without factors, with equal ranks."""

    def corrected(self, correction: Correction) -> Self:
        """Return the same costs with a correction from training."""

    def whole_backwards(self) -> Self:
        """Return the same costs without split backwards."""
