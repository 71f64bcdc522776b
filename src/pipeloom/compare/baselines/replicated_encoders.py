"""Costs of encoders that are on every pipeline rank, with optimizer state sharded over all devices."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipeloom.compare.model_on_cluster import LEVELS, ModelOnCluster
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.spec import Chunk
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

    def static_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of weights, gradients and optimizer state on one device."""
        if chunk.module in self._encoders:
            return self._whole.static_bytes(chunk)
        return super().static_bytes(chunk)

    def update_s(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds at a rank's end of an iteration, the update of its encoders included."""
        encoders = [chunk for chunk in chunks if chunk.module in self._encoders]
        backbone = [chunk for chunk in chunks if chunk.module not in self._encoders]
        return super().update_s(backbone) + self._whole.update_s(encoders)
