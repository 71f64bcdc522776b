"""CostModel: seconds and bytes of any chunk on any (sub-)microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from pipeloom.cost.correction import Correction, Slowed
from pipeloom.spec import Chunk, Layout, Workload


@dataclass(frozen=True, slots=True)
class StrategyCost:
    """A chunk on one (sub-)microbatch under one memory strategy.

    ``backward_s`` is the whole backward; ``backward_input_s`` and ``backward_weight_s`` are its two parts
    where they are known, else None (such a chunk is never split). ``host_bytes`` lie on the host meanwhile.
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
    """What a chunk's passes on one (sub-)microbatch need beside what is held, under one memory strategy."""

    forward_bytes: int
    """Most that its forward uses while it runs."""
    backward_bytes: int
    """Most that a whole backward uses."""
    first_half_bytes: int
    second_half_bytes: int
    moved_bytes: int
    """On the device before they have been moved to the host, and again once they were brought back."""


def link_table(costs: CostModel, num_ranks: int) -> npt.NDArray[np.int64]:
    """Number of the link between any two ranks, shape (num_ranks, num_ranks)."""
    ranks = range(num_ranks)
    return np.array([[costs.link_between(a, b) for b in ranks] for a in ranks], np.int64)


def between_s(costs: CostModel, num_bytes: int, first: int, second: int) -> float:
    """Seconds that a message takes between two ranks."""
    return costs.transfer_s(num_bytes, costs.link_between(first, second))


def rank_static_bytes(costs: CostModel, layout: Layout) -> npt.NDArray[np.int64]:
    """Bytes of weights, gradients and optimiser state on every rank, shape (num_ranks,)."""
    found = np.zeros(layout.num_ranks, np.int64)
    for chunk in layout.chunks:
        found[chunk.rank] += costs.static_bytes(chunk)
    return found


class CostModel(Slowed, Protocol):
    """What planning asks about the machine; behind it is a measured profile or the emulator."""

    @property
    def split_backward(self) -> bool:
        """Whether the halves of backwards are known, so that a plan may split them."""
        ...

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        """Costs of a chunk on a workload, on its rank, one per memory strategy; the first is the base (keep)."""
        ...

    def workspace_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Most that a pass of the chunk uses beyond what is held, under any of its strategies that do not offload.

        Where all of them offload: under any, with what that stages.
        """
        ...

    def staging_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """What it uses more under strategies that offload: room for what is on its way to the host and back."""
        ...

    def boundary_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Bytes of the chunk's output, which is what the next chunk receives."""
        ...

    def stream_bytes(self, stream: str, workload: Workload) -> int:
        """Bytes of a stream whose emitting layer has this workload."""
        ...

    def link_between(self, first: int, second: int) -> int:
        """Number of the link between two ranks; links are numbered from 0."""
        ...

    def transfer_s(self, num_bytes: int, link: int = 0) -> float:
        """Seconds that a message takes over a link."""
        ...

    def static_bytes(self, chunk: Chunk) -> int:
        """Bytes of the chunk's weights, gradients and optimiser state."""
        ...


class PlannedCosts(CostModel, Protocol):
    """What a planner asks beyond one graph: the choices that it may leave out, and what training has taught."""

    @property
    def strategies(self) -> Sequence[object]:
        """Memory strategies that are offered for every pair; the first is the base."""
        ...

    @property
    def factors(self) -> Mapping[str, tuple[float, float]]:
        """Per module, what its seconds of (forward, backward) were multiplied by; absent means 1."""
        ...

    def uncorrected(self) -> Self:
        """Return the same costs with no factors, and all ranks alike."""
        ...

    def corrected(self, correction: Correction) -> Self:
        """Return the same costs corrected by what was measured while training ran."""
        ...

    def whole_backwards(self) -> Self:
        """Return the same costs without the halves of backwards."""
        ...
