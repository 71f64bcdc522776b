"""What it is trained on: pipeline ranks, their memory, and the links between them."""

from __future__ import annotations

import msgspec

from pipeloom.errors import InputError


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
        if not 0 < self.link_bytes_per_s < float("inf"):
            raise InputError(
                "cluster.link_bytes_per_s", f"{self.link_bytes_per_s} is not positive and finite"
            )
        if not 0 <= self.link_latency_s < float("inf"):
            raise InputError("cluster.link_latency_s", f"{self.link_latency_s} is not finite and at least 0")

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds that a message of ``num_bytes`` takes between two ranks."""
        return self.link_latency_s + num_bytes / self.link_bytes_per_s
