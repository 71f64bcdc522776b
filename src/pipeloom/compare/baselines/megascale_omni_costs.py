"""Costs of encoders that are not parallel as the backbone is: each device of a rank encodes samples of its own."""

from __future__ import annotations

from heapq import heapify, heapreplace

import msgspec

from pipeloom.compare.model_on_cluster import LEVELS, ModelOnCluster
from pipeloom.cost import StrategyCost
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.layout.choose import ring_seconds
from pipeloom.spec import Chunk, Layout, Workload


class LongShortCosts(EmulatedCosts):
    """Costs of `ModelOnCluster.levels`, with encoders as MegaScale-Omni has them (arXiv 2605.08962).

    Short and long sequences are encoded in different ways. A part of short ones is dealt to the tensor-parallel devices
    of a rank, longest first, and takes as long as the device that has most; each device has the whole encoder. A part
    of long ones is divided inside its sequences: its time and memory are taken to be those of the rank's tensor
    parallelism, which moves as many bytes. Whichever is faster for a part is taken. The encoders' optimiser state is
    sharded over all devices. What is left out, in its favour: handing encodings from device to device inside a rank.
    """

    def __init__(self, case: ModelOnCluster) -> None:
        degrees = case.degrees
        super().__init__(case.architecture, case.cluster, degrees, LEVELS, split=False)
        everywhere = msgspec.structs.replace(
            degrees, tensor=1, pipeline=1, expert=1, data=degrees.tensor * degrees.pipeline * degrees.data
        )
        self._whole = EmulatedCosts(case.architecture, case.cluster, everywhere, LEVELS, split=False)
        self._encoders = {module.name for module in case.model.modules[:-1]}

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        """Costs of a chunk on a workload, one per strategy; of an encoder, in the faster of the two ways."""
        divided = super().chunk_costs(chunk, workload)
        if chunk.module not in self._encoders or workload.given:
            return divided
        dealt = self._whole.chunk_costs(chunk, self._largest_share(workload))
        return min(divided, dealt, key=lambda costs: costs[0].forward_s + costs[0].backward_s)

    def workspace_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Most that a pass uses beyond what is held, in the one way and in the other."""
        divided = super().workspace_bytes(chunk, workload)
        if chunk.module not in self._encoders or workload.given:
            return divided
        return max(divided, self._whole.workspace_bytes(chunk, self._largest_share(workload)))

    def static_bytes(self, chunk: Chunk) -> int:
        """Bytes of weights, gradients and optimiser state on one device: of encoders, whole."""
        if chunk.module in self._encoders:
            return self._whole.static_bytes(chunk)
        return super().static_bytes(chunk)

    def reduction_s(self, layout: Layout, parameters: dict[str, int]) -> float:
        """Seconds to add up the encoders' gradients over all devices of a pipeline, after the last backward.

        First inside each rank, then over the ranks with each device having a share, then back.

        Parameters
        ----------
        parameters : dict
            Of every module.
        """
        degrees = self.placement.degrees
        tensor = degrees.tensor
        shares = {name: count * degrees.state.gradient // tensor for name, count in parameters.items()}
        inside = sum(shares[m.name] for m in layout.modules if m.on_ranks == "replicated" and not m.frozen)
        over_ranks = ring_seconds(layout, shares, self)
        # Inside a rank devices are as near as ranks ever are.
        return over_ranks + (2 * (tensor - 1) * self.transfer_s(inside, 1) if inside and tensor > 1 else 0.0)

    def _largest_share(self, workload: Workload) -> Workload:
        """What the device with most tokens has, where sequences are dealt longest first to the one with least."""
        tensor = self.placement.degrees.tensor
        shares: list[tuple[int, int, tuple[int, ...]]] = [(0, device, ()) for device in range(tensor)]
        heapify(shares)
        for length in sorted(workload.lengths, reverse=True):
            total, device, mine = shares[0]
            heapreplace(shares, (total + length, device, (*mine, length)))
        return Workload(max(shares)[2])
