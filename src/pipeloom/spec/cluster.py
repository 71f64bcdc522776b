"""What it is trained on: pipeline ranks, their memory, and the links between them."""

from __future__ import annotations

import msgspec

from pipeloom.errors import InputError, check_not_negative, check_positive


class ClusterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ranks of one pipeline replica, as the planner sees them."""

    name: str = "local"
    memory_capacity_bytes: int | None = None
    """Memory of each rank; None: no limit."""
    link_bytes_per_s: float = 1e9
    """Point-to-point bandwidth between two pipeline ranks."""
    link_latency_s: float = 1e-4
    """Time of an empty message between two pipeline ranks."""

    def __post_init__(self) -> None:
        """Refuse links and memories that cannot exist."""
        if self.memory_capacity_bytes is not None and self.memory_capacity_bytes <= 0:
            raise InputError("cluster.memory_capacity_bytes", f"{self.memory_capacity_bytes} is not positive")
        check_positive("cluster.link_bytes_per_s", self.link_bytes_per_s)
        check_not_negative("cluster.link_latency_s", self.link_latency_s)

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds that a message of ``num_bytes`` takes between two ranks."""
        return self.link_latency_s + num_bytes / self.link_bytes_per_s
