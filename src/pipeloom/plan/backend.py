"""What each communication backend asks of plans: here, so that the planner and the runtime cannot disagree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BackendName = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Backend:
    """How a backend serves point-to-point messages.

    Attributes
    ----------
    serial : bool
        A rank's messages may be served one after the other, whoever the peers are: plans are lowered and verified
        for that. NCCL serves those of one communicator so, and a group has one where it was made with a device or
        where messages are joined.
    joins : bool
        Neighbouring messages between two ranks gain by being one operation: NCCL then exchanges both directions at
        once. Gloo posts them one by one all the same.
    """

    serial: bool
    joins: bool


BACKENDS: dict[BackendName, Backend] = {
    "gloo": Backend(serial=False, joins=False),
    "nccl": Backend(serial=True, joins=True),
}


def backend_of(device_type: str) -> BackendName:
    """Return the backend of messages between devices of a type, ``"cpu"`` or ``"cuda"``."""
    return "nccl" if device_type == "cuda" else "gloo"
