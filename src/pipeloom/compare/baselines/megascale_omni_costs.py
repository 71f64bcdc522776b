"""Costs of encoders with other parallelism than the backbone: each device of a rank encodes its own samples."""

from __future__ import annotations

from heapq import heapify, heapreplace

import msgspec

from pipeloom.compare.baselines.replicated_encoders import ReplicatedEncoderCosts
from pipeloom.cost import StrategyCost
from pipeloom.spec import Chunk, Workload
from pipeloom.spec.parallelism import Degrees


class LongShortCosts(ReplicatedEncoderCosts):
    """Costs of `ModelOnCluster.levels`, with the encoders of MegaScale-Omni (arXiv 2605.08962).

    Short and long sequences are encoded in different ways. Short sequences of a part are assigned to the
    tensor-parallel devices of a rank, longest first; the part takes as long as its most loaded device, and each device
    has the whole encoder. Long sequences are divided among the devices: time and memory are assumed to be those of the
    rank's tensor parallelism, which transfers as many bytes. Each part uses the faster way. Transfers of encodings
    between the devices of a rank are not counted, in its favor.
    """

    def _encoder_degrees(self, degrees: Degrees) -> Degrees:
        """Return the degrees of whole encoders: every device of a pipeline is a replica."""
        data = degrees.tensor * degrees.pipeline * degrees.data
        return msgspec.structs.replace(degrees, tensor=1, pipeline=1, expert=1, data=data)

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

    def _largest_share(self, workload: Workload) -> Workload:
        """Return the share of the most loaded device, with sequences assigned longest first to the least loaded."""
        tensor = self.placement.degrees.tensor
        shares: list[tuple[int, int, tuple[int, ...]]] = [(0, device, ()) for device in range(tensor)]
        heapify(shares)
        for length in sorted(workload.lengths, reverse=True):
            total, device, mine = shares[0]
            heapreplace(shares, (total + length, device, (*mine, length)))
        return Workload(max(shares)[2])
