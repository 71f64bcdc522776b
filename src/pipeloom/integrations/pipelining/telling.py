"""What the rank of the first stage tells all others at the beginning of a step."""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist

from pipeloom.errors import ExecutionError
from pipeloom.integrations.pipelining.planning import Order
from pipeloom.integrations.pipelining.shapes import Signature
from pipeloom.runtime.launch.coordination import broadcast_bytes

_REPORT = 1024
"""Bytes of a report."""
_MOST_TOLD = 900
"""Bytes of a failure in it."""
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
    """Why there is no step, and on which rank."""


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of its inputs before there is a step."""

    name: str = ""
    """What was given by microbatch; empty: nothing."""
    count: int = 0
    """How many of it."""
    trains: bool = True
    """Whether this rank runs a training step; false: forwards alone."""
    failure: str = ""
    """Why this rank cannot take part."""


class Telling:
    """All ranks report to one, which tells them what they will do.

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

    def global_rank(self, place: int) -> int:
        """Of a rank of the group, the number by which users know it."""
        return place if self.group is None else dist.get_global_rank(self.group, place)

    def gather(self, report: StepReport) -> list[StepReport]:
        """Give the rank that tells what all ranks report, by rank of the group; to all others nothing.

        A rank that only found out later that it cannot run would leave the others waiting until their group gives up.
        """
        if self.is_alone:
            return [report]
        failure = report.failure.encode()[:_MOST_TOLD].decode(errors="ignore")
        data = msgspec.msgpack.encode(StepReport(report.name, report.count, report.trains, failure))
        frame = torch.zeros(_REPORT, dtype=torch.uint8)
        frame[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        frame = frame.to(self.device)
        every = [torch.empty_like(frame) for _ in range(dist.get_world_size(self.group))] if self.tells else None
        dist.gather(frame, every, group=self.group, group_dst=self._place)
        decoder = msgspec.msgpack.Decoder(StepReport)
        # Its last field is text: what is zero behind it is room.
        return [decoder.decode(each.cpu().numpy().tobytes().rstrip(b"\0")) for each in every or ()]

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
            raise ExecutionError(heard.failure)
        return heard
