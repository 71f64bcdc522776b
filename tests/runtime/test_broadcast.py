"""Bytes of any size arrive whole on every rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pipeloom.runtime import launch
from pipeloom.runtime.coordination import AT_ONCE, broadcast_bytes

pytestmark = pytest.mark.ranks

SIZES = (0, 1, 1000, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE + 7)


def _content(size: int) -> bytes:
    return bytes((i * 7 + size) % 251 for i in range(size))


def _receive() -> list[bool]:
    found = []
    for size in SIZES:
        for source in (0, 2):
            mine = _content(size) if dist.get_rank() == source else None
            found.append(broadcast_bytes(mine, source=source) == _content(size))
    return found


def test_bytes_of_any_size_arrive_on_every_rank() -> None:
    assert launch(_receive, 3) == [[True] * 2 * len(SIZES)] * 3
