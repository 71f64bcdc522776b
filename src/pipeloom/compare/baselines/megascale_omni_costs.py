"""Costs of encoders with other parallelism than the backbone: each device of a rank encodes its own samples."""

from __future__ import annotations

from heapq import heapify, heapreplace

import msgspec

from pipeloom.compare.model_on_cluster import LEVELS, ModelOnCluster
from pipeloom.cost import StrategyCost
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.layout.choose import ring_seconds
from pipeloom.spec import Chunk, Layout, Workload


class LongShortCosts(EmulatedCosts):
    """Costs of `ModelOnCluster.levels`, with the encoders of MegaScale-Omni (arXiv 2605.08962).

    Short and long sequences are encoded in different ways. Short sequences of a part are assigned to the
    tensor-parallel devices of a rank, longest first; the part takes as long as its most loaded device, and each device
    has the whole encoder. Long sequences are divided among the devices: time and memory are assumed to be those of the
    rank's tensor parallelism, which transfers as many bytes. Each part uses the faster way. The encoders' optimizer
    state is sharded over all devices. Transfers of encodings between the devices of a rank are not counted, in its
    favor.
    """

    def __init__(self, setting: ModelOnCluster) -> None:
        degrees = setting.degrees
        trainer = setting.trainer
        super().__init__(setting.architecture, setting.cluster, degrees, LEVELS, split=False, trainer=trainer)
        everywhere = msgspec.structs.replace(
            degrees, tensor=1, pipeline=1, expert=1, data=degrees.tensor * degrees.pipeline * degrees.data
        )
        self._whole = EmulatedCosts(
            setting.architecture, setting.cluster, everywhere, LEVELS, split=False, trainer=trainer
        )
        self._encoders = {module.name for module in setting.model.modules[:-1]}

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        """Return the costs of a chunk on a workload, one per strategy; an encoder uses the faster way."""
        divided = super().chunk_costs(chunk, workload)
        if chunk.module not in self._encoders or workload.given:
            return divided
        shared = self._whole.chunk_costs(chunk, self._largest_share(workload))
        return min(divided, shared, key=lambda costs: costs[0].forward_s + costs[0].backward_s)

    def workspace_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the workspace of a pass; for an encoder, the larger of both ways."""
        divided = super().workspace_bytes(chunk, workload)
        if chunk.module not in self._encoders or workload.given:
            return divided
        return max(divided, self._whole.workspace_bytes(chunk, self._largest_share(workload)))

    def static_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of weights, gradients and optimizer state on one device; encoders are not divided."""
        if chunk.module in self._encoders:
            return self._whole.static_bytes(chunk)
        return super().static_bytes(chunk)

    def reduction_s(self, layout: Layout, parameters: dict[str, int]) -> float:
        """Return the time to reduce the encoders' gradients over all devices of a pipeline, after the last backward.

        The reduction runs inside each rank, then over the ranks with one share per device, then back inside each rank.

        Parameters
        ----------
        parameters : dict
            Number of parameters of every module.
        """
        degrees = self.placement.degrees
        tensor = degrees.tensor
        shares = {name: count * degrees.state.gradient // tensor for name, count in parameters.items()}
        inside = sum(shares[m.name] for m in layout.modules if m.on_ranks == "replicated" and not m.frozen)
        over_ranks = ring_seconds(layout, shares, self)
        # Devices of one rank use the fastest link between ranks.
        return over_ranks + (2 * (tensor - 1) * self.transfer_s(inside, 1) if inside and tensor > 1 else 0.0)

    def _largest_share(self, workload: Workload) -> Workload:
        """Return the share of the most loaded device, with sequences assigned longest first to the least loaded."""
        tensor = self.placement.degrees.tensor
        shares: list[tuple[int, int, tuple[int, ...]]] = [(0, device, ()) for device in range(tensor)]
        heapify(shares)
        for length in sorted(workload.lengths, reverse=True):
            total, device, mine = shares[0]
            heapreplace(shares, (total + length, device, (*mine, length)))
        return Workload(max(shares)[2])
