"""Handing the same bytes, a plan mostly, from one rank to all."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from pipeloom.packing import Packing, packing_from_counts
from pipeloom.plan import Answer
from pipeloom.spec import Batch, Layout, ModelSpec

AT_ONCE = 256 * 1024
"""Bytes that travel with their length: about 5000 actions."""
_LENGTH_BYTES = 8


def broadcast_bytes(data: bytes | None, group: dist.ProcessGroup | None = None) -> bytes:
    """Send bytes from the first rank of a group, the only one to give ``data``, to all of it."""
    # A length sent ahead would put every rank to sleep and wake it twice, which costs more than the empty bytes.
    first = np.zeros(_LENGTH_BYTES + AT_ONCE, np.uint8)
    if data is not None:
        first[:_LENGTH_BYTES] = np.frombuffer(len(data).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
        first[_LENGTH_BYTES:][: len(data)] = np.frombuffer(data[:AT_ONCE], np.uint8)
    dist.broadcast(torch.from_numpy(first), group=group, group_src=0)
    size = int.from_bytes(first[:_LENGTH_BYTES].tobytes(), "little")
    head = first[_LENGTH_BYTES:][:size].tobytes()
    if size <= AT_ONCE:
        return head
    rest = np.zeros(size - AT_ONCE, np.uint8)
    if data is not None:
        rest[:] = np.frombuffer(data, np.uint8, offset=AT_ONCE)
    dist.broadcast(torch.from_numpy(rest), group=group, group_src=0)
    return head + rest.tobytes()


def unpack_answer(data: bytes, batch: Batch, model: ModelSpec, layout: Layout) -> tuple[Answer, Packing]:
    """What a rank makes of the bytes that rank 0 hands out; rank 0 has checked them."""
    answer = msgspec.msgpack.decode(data, type=Answer)
    counts = answer.packing
    return answer, packing_from_counts(batch, model, layout, counts.samples, counts.counts)
