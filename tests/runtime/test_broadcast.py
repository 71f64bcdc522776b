"""Bytes of any size arrive whole on every rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pipeloom.errors import ExecutionError
from pipeloom.runtime.launch import coordination
from pipeloom.runtime.launch.coordination import AT_ONCE, broadcast_bytes, scatter_bytes
from pipeloom.runtime.launch.processes import launch

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


def _receive_too_many() -> list[str]:
    found = []
    for rank in (0, 1):
        coordination.MOST_BYTES = 100
        try:
            broadcast_bytes(bytes(101) if dist.get_rank() == rank else None, at_once=50, source=rank)
        except ExecutionError as error:
            found.append(str(error))
    return found


def test_for_a_length_that_cannot_be_no_room_is_made() -> None:
    reported = "a message of 101 bytes is larger than 100, the most that is sent at once"
    assert launch(_receive_too_many, 2) == [[reported] * 2] * 2


def test_bytes_of_any_size_arrive_on_every_rank() -> None:
    assert launch(_receive, 3) == [[True] * 2 * len(SIZES)] * 3


def _receive_own() -> list[bool]:
    found, rank = [], dist.get_rank()
    for size in SIZES:
        sizes = [size, 0, size // 2]
        mine = scatter_bytes([_content(each) for each in sizes] if rank == 0 else None, at_once=1000)
        found.append(mine == _content(sizes[rank]))
    return found


def _receive_too_many_of_own() -> str:
    coordination.MOST_BYTES = 100
    try:
        scatter_bytes([b"", bytes(101)] if dist.get_rank() == 0 else None, at_once=50)
    except ExecutionError as error:
        return str(error)
    return ""


def test_every_rank_gets_its_own_bytes_whatever_the_others_get() -> None:
    assert launch(_receive_own, 3) == [[True] * len(SIZES)] * 3


def test_all_ranks_refuse_a_length_that_cannot_be_whoever_it_is_for() -> None:
    reported = "a message of 101 bytes is larger than 100, the most that is sent at once"
    assert launch(_receive_too_many_of_own, 2) == [reported] * 2
