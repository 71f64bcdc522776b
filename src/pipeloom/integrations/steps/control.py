"""Agreement of ranks at the beginning of a step: they report, and the rank of the first stage broadcasts."""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist

from pipeloom.errors import ExecutionError
from pipeloom.integrations.steps.planning import Order
from pipeloom.integrations.steps.shapes import Signature
from pipeloom.runtime.launch.coordination import broadcast_bytes, message_device

_REPORT = 1024
"""Bytes of a report."""
_MOST_FAILURE = 900
"""Most bytes of the failure in a report."""
_FRAME = 4096
"""Bytes of a message that are sent together with its length."""


class StepMessage(msgspec.Struct, frozen=True, array_like=True):
    """The order of a step and the signatures of its inputs."""

    number: int = 0
    """Identifies the order; the order itself is sent with its first message only."""
    measures: bool = False
    """Whether the costs of the stages are measured in this step."""
    order: Order | None = None
    signatures: tuple[Signature, ...] | None = None
    """None: the same as in the last message with this number."""
    widths: tuple[float, ...] | None = None
    """New widths of the stages' outputs, by which later plans are made."""
    failure: str = ""
    """Why the step does not run, and on which rank; empty if it runs."""
    modes: str = ""
    """Modes of the ranks; see `StepReport`."""


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """Inputs of one rank, which it reports before the step is decided."""

    name: str = ""
    """Name of the argument that has microbatches; empty if no argument has."""
    count: int = 0
    """Number of those microbatches."""
    trains: bool = True
    """Whether this rank runs a training step; otherwise it runs forwards only."""
    mode: str = ""
    """What shapes and types of outputs depend on besides the inputs: the type of autocast, and whether stages train."""
    failure: str = ""
    """Why this rank cannot take part."""


def source_of(pipeline: dist.ProcessGroup | None, leader: int, together: dist.ProcessGroup | None) -> int:
    """Return the global rank that broadcasts: the first stage's rank, of the first pipeline if there are several.

    ``leader`` is the rank of the first stage in the pipeline's group. ``together`` has all receivers, where they are
    more than the pipeline. All of its ranks call this function together.
    """
    first = leader if pipeline is None else dist.get_global_rank(pipeline, leader)
    if together is None:
        return first
    every: list[int | None] = [None] * dist.get_world_size(together)
    dist.all_gather_object(every, first, group=together)
    return min(rank for rank in every if rank is not None)


class ControlChannel:
    """Gathers reports of all ranks of a group on one of them, which broadcasts what all will run.

    Parameters
    ----------
    source : int
        Global rank of the one that broadcasts.
    device : torch.device
        Device of the messages, unless the group also supports the CPU.
    """

    def __init__(self, group: dist.ProcessGroup | None, source: int, device: torch.device | str) -> None:
        self.group, self.source = group, source
        self.broadcasts = dist.get_rank() == self.source
        self.place = self.source if self.group is None else dist.get_group_rank(self.group, self.source)
        """Rank of the source in the group."""
        self.is_alone = dist.get_world_size(self.group) == 1
        self.device = message_device(group, device)

    def global_rank(self, place: int) -> int:
        """Return the global rank of a rank of the group."""
        return place if self.group is None else dist.get_global_rank(self.group, place)

    def gather(self, report: StepReport) -> list[StepReport]:
        """Return the reports of all ranks, by rank of the group, on the rank that broadcasts; an empty list elsewhere.

        Without it, a rank that fails later would leave the others waiting until their group times out.
        """
        if self.is_alone:
            return [report]
        failure = report.failure.encode()[:_MOST_FAILURE].decode(errors="ignore")
        data = msgspec.msgpack.encode(msgspec.structs.replace(report, failure=failure))
        frame = torch.zeros(_REPORT, dtype=torch.uint8)
        frame[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        frame = frame.to(self.device)
        every = [torch.empty_like(frame) for _ in range(dist.get_world_size(self.group))] if self.broadcasts else None
        dist.gather(frame, every, group=self.group, group_dst=self.place)
        decoder = msgspec.msgpack.Decoder(StepReport)
        # The last field is text, so that the zeros behind it are padding.
        return [decoder.decode(each.cpu().numpy().tobytes().rstrip(b"\0")) for each in every or ()]

    def broadcast(self, message: StepMessage | None) -> StepMessage:
        """Broadcast a message, and return it. Receivers raise `ExecutionError` if it reports a failure."""
        if message is not None and self.is_alone:
            return message
        data = None if message is None else msgspec.msgpack.encode(message)
        data = broadcast_bytes(data, self.group, _FRAME, source=self.place, device=self.device)
        if message is not None:
            return message
        received = msgspec.msgpack.decode(data, type=StepMessage)
        if received.failure:
            raise ExecutionError(received.failure)
        return received
