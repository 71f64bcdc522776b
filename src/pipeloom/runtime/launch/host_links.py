"""Hosts and links of a run over several hosts, measured when it starts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement
from statistics import median

import torch
import torch.distributed as dist

from pipeloom.cost import fit_link, host_link
from pipeloom.runtime.launch import accelerator
from pipeloom.runtime.launch.coordination import gather_hosts, together
from pipeloom.spec import HostLink

SIZES = (8, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
"""Sizes in bytes of the timed messages."""
_REPEATS = 5
_PAIR_S = 0.4
"""Seconds after which a pair of ranks tries no larger message."""


def find_hosts() -> tuple[int, ...]:
    """Return the host number of every rank.

    Hosts are numbered in the order of their first ranks. All ranks call it together.
    """
    with together("finding the hosts of all ranks"):
        names = gather_hosts()
    number: dict[bytes, int] = {}
    return tuple(number.setdefault(name, len(number)) for name in names)


def measure_links(hosts: Sequence[int], device: torch.device | str = "cpu") -> tuple[HostLink, ...]:
    """Time messages inside each host and between any two hosts. All ranks of the default group call it together.

    ``hosts`` has the host of every rank, see `find_hosts`. Messages are on the ``device`` of training. One pair of
    ranks represents all pairs on its hosts. Pairs without a common host are timed at the same time, so that the time
    grows with the number of hosts, not of pairs. The result is the same on all ranks. A host with one rank has no inner
    link.
    """
    rank, own = dist.get_rank(), list[HostLink]()
    with together("measuring the links between hosts"):
        for at_once in rounds(hosts):
            for pair, (low, high) in at_once.items():
                if rank in (low, high):
                    timed = _exchange(high if rank == low else low, leads=rank == low, device=torch.device(device))
                    line = fit_link(timed)
                    if rank == low and line is not None:
                        own.append(host_link(pair, line))
            dist.barrier()
        by_rank: list[list[HostLink]] = [[] for _ in hosts]
        dist.all_gather_object(by_rank, own)
    return tuple(sorted((link for each in by_rank for link in each), key=lambda link: link.hosts))


def rounds(hosts: Sequence[int]) -> Iterator[dict[tuple[int, int], tuple[int, int]]]:
    """Yield rounds of pairs of hosts with the ranks to time. Pairs of one round have no common host."""
    ranks = {host: [rank for rank, each in enumerate(hosts) if each == host] for host in sorted(set(hosts))}
    left = {
        (a, b): (ranks[a][0], ranks[b][0] if a != b else ranks[a][1])
        for a, b in combinations_with_replacement(ranks, 2)
        if a != b or len(ranks[a]) > 1
    }
    while left:
        busy, now = set[int](), dict[tuple[int, int], tuple[int, int]]()
        for pair, ends in left.items():
            if not busy.intersection(pair):
                busy.update(pair)
                now[pair] = ends
        left = {pair: ends for pair, ends in left.items() if pair not in now}
        yield now


def _exchange(peer: int, *, leads: bool, device: torch.device) -> list[tuple[int, float]]:
    """Send messages back and forth. Returns bytes and seconds of one direction, valid on the leading rank."""

    def exchange(size: int) -> float:
        there, back = torch.zeros(2, size, dtype=torch.uint8, device=device).unbind()
        since = time.perf_counter()
        for sends in (leads, not leads):
            if sends:
                dist.send(there, peer)
            else:
                dist.recv(back, peer)
        accelerator.synchronize(device)
        return (time.perf_counter() - since) / 2

    # NCCL connects two ranks at their first message, which can take longer than all that is timed.
    exchange(1)
    begin, timed = time.perf_counter(), list[tuple[int, float]]()
    for size in SIZES:
        # The first exchange is a warm-up.
        seconds = [exchange(size) for _ in range(1 + _REPEATS)]
        timed.append((size, median(seconds[1:])))
        more = torch.tensor([int(time.perf_counter() - begin < _PAIR_S)], device=device)
        if leads:
            dist.send(more, peer)
        else:
            dist.recv(more, peer)
        if not int(more):
            break
    return timed
