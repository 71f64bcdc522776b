"""Costs of collectives.

Collectives move as many bytes as a ring: (n-1)/n of the gathered bytes per device for an all-gather or reduce-scatter,
twice that for an all-reduce, in n-1 (2 (n-1)) messages.
"""

from __future__ import annotations

from pipeloom.emulator.size import Size
from pipeloom.emulator.tape import NVLINK, Cost, Group


def ring(kind: str, num_bytes: Size, peers: int, group: Group, *, passes: int = 1) -> Cost:
    """Return the cost of a collective over a ring. ``num_bytes`` is the size of all gathered or reduced data."""
    network = num_bytes * (passes * (peers - 1) / peers / group.lanes)
    return Cost(kind, network=network, device=group.device, steps=passes * (peers - 1), variant=peers)


def all_reduce_cost(num_bytes: Size, peers: int, group: Group) -> Cost:
    """Return the cost of an all-reduce."""
    return ring("all_reduce", num_bytes, peers, group, passes=2)


def all_to_all_cost(num_bytes: Size, peers: int, group: Group) -> Cost:
    """Return the cost of an all-to-all of ``num_bytes`` per device. Over NICs, only bytes for other nodes count."""
    sent = (peers - (1 if group.device == NVLINK else min(group.local, peers - 1))) / peers
    return Cost("all_to_all", network=num_bytes * sent, device=group.device, steps=peers - 1, variant=peers)
