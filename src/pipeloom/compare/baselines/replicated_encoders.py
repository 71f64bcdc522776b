"""Costs of encoders that are on every pipeline rank, with optimizer state sharded over all devices."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

import msgspec

from pipeloom.compare.model_on_cluster import LEVELS, ModelOnCluster
from pipeloom.cost import StrategyCost
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.spec import Chunk, Workload
from pipeloom.spec.parallelism import Degrees


class ReplicatedEncoderCosts(EmulatedCosts):
    """Costs of `ModelOnCluster.levels`, where the ranks of a pipeline are more replicas of the encoders.

    So gradients of encoders are reduced, and their optimizer state is sharded, over the devices of all ranks.
    """

    def __init__(self, setting: ModelOnCluster) -> None:
        model, cluster, trainer = setting.architecture, setting.cluster, setting.trainer
        super().__init__(model, cluster, setting.degrees, LEVELS, split=False, trainer=trainer)
        everywhere = self._encoder_degrees(setting.degrees)
        self._whole = EmulatedCosts(model, cluster, everywhere, LEVELS, split=False, trainer=trainer)
        self._encoders = {module.name for module in setting.model.modules[:-1]}

    def _encoder_degrees(self, degrees: Degrees) -> Degrees:
        """Return the encoders' degrees of parallelism."""
        return msgspec.structs.replace(degrees, pipeline=1, data=degrees.pipeline * degrees.data)

    def static_bytes_together(self, chunks: Sequence[Chunk]) -> int:
        """Return the bytes of weights, gradients and optimizer state of all chunks of one rank on one device."""
        encoders, backbone = self._apart(chunks)
        return super().static_bytes_together(backbone) + self._whole.static_bytes_together(encoders)

    def _apart(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
        """Return the chunks of encoders, and those of the backbone."""
        encoders = [chunk for chunk in chunks if chunk.module in self._encoders]
        return encoders, [chunk for chunk in chunks if chunk.module not in self._encoders]

    def update_s(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds at a rank's end of an iteration, the update of its encoders included."""
        encoders, backbone = self._apart(chunks)
        return super().update_s(backbone) + self._whole.update_s(encoders)


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
