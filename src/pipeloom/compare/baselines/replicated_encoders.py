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
