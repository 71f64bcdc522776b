"""What the rank of the first stage tells all others at the beginning of a step."""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist

from pipeloom.errors import ExecutionError
from pipeloom.integrations.pipelining.planning import Order
from pipeloom.integrations.pipelining.shapes import Signature
from pipeloom.runtime.coordination import broadcast_bytes

_FRAME = 4096
"""Bytes that travel with their length."""


class StepMessage(msgspec.Struct, frozen=True, array_like=True):
    """A step: which order runs, on what."""

    number: int = 0
    """Of the order; one that was told before is known by it."""
    measures: bool = False
    order: Order | None = None
    signatures: tuple[Signature, ...] | None = None
    """None: as when the number was told last."""
    widths: tuple[float, ...] | None = None
    """New ones, by which plans are made from here on."""
    failure: str = ""
    """Why there is no step."""


class Telling:
    """One rank tells, all others hear.

    Parameters
    ----------
    pipeline : torch.distributed.ProcessGroup or None
    leader : int
        Rank in it of the first stage.
    together : torch.distributed.ProcessGroup or None
        All that hear, where they are more than the pipeline; its first leader tells.
    device : torch.device
    """

    def __init__(
        self,
        pipeline: dist.ProcessGroup | None,
        leader: int,
        together: dist.ProcessGroup | None,
        device: torch.device | str,
    ) -> None:
        self.group = pipeline if together is None else together
        leaders = dist.get_global_rank(pipeline, leader) if pipeline is not None else leader
        self.source = leaders
        if together is not None:
            every: list[int | None] = [None] * dist.get_world_size(together)
            dist.all_gather_object(every, leaders, group=together)
            self.source = min(rank for rank in every if rank is not None)
        self.tells = dist.get_rank() == self.source
        self._place = self.source if self.group is None else dist.get_group_rank(self.group, self.source)
        """Of who tells, in the group."""
        self.is_alone = dist.get_world_size(self.group) == 1
        # Where the group serves the host too, nothing is moved to the device.
        serves_host = "gloo" in str(dist.get_backend_config(self.group))
        self.device = torch.device("cpu") if serves_host else torch.device(device)

    def tell(self, message: StepMessage | None) -> StepMessage:
        """Give all ranks a message; one gives it.

        Raises
        ------
        ExecutionError
            When the message is of a failure, on those that hear it.
        """
        if message is not None and self.is_alone:
            return message
        data = None if message is None else msgspec.msgpack.encode(message)
        data = broadcast_bytes(data, self.group, _FRAME, source=self._place, device=self.device)
        if message is not None:
            return message
        heard = msgspec.msgpack.decode(data, type=StepMessage)
        if heard.failure:
            raise ExecutionError(f"rank {self.source}, of the first stage: {heard.failure}")
        return heard
