"""The links of a run over several hosts, measured at its start: who is on which host, and what messages take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement
from statistics import median

import torch
import torch.distributed as dist

from pipeloom.cost import fit_link, host_link
from pipeloom.runtime.launch.coordination import gather_hosts, together
from pipeloom.spec import HostLink

SIZES = (8, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of the messages that are timed."""
_REPEATS = 5
_PAIR_S = 0.4
"""A pair of ranks that took longer tries no larger message."""


def find_hosts() -> tuple[int, ...]:
    """Number the hosts in the order of their first ranks; of every rank, its host's. All ranks call it together."""
    with together("finding the hosts of all ranks"):
        names = gather_hosts()
    number: dict[bytes, int] = {}
    return tuple(number.setdefault(name, len(number)) for name in names)


def measure_links(hosts: Sequence[int], device: torch.device | str = "cpu") -> tuple[HostLink, ...]:
    """Time messages inside each host and between any two; all ranks of the default group call it together.

    One pair of ranks stands for all pairs on its hosts. Pairs without a host in common are timed at once, so that time
    grows with the number of hosts, not of their pairs.

    Parameters
    ----------
    hosts : sequence of int
        Of every rank, see `find_hosts`.
    device : torch.device or str
        On which messages begin and end, as in training.

    Returns
    -------
    tuple of HostLink
        On all ranks the same; nothing for the inside of a host with one rank.

    Raises
    ------
    ExecutionError
        Another rank is gone.
    """
    rank, mine = dist.get_rank(), list[HostLink]()
    with together("measuring the links between hosts"):
        for at_once in rounds(hosts):
            for pair, (low, high) in at_once.items():
                if rank in (low, high):
                    timed = _exchange(high if rank == low else low, leads=rank == low, device=torch.device(device))
                    line = fit_link(timed)
                    if rank == low and line is not None:
                        mine.append(host_link(pair, line))
            dist.barrier()
        found: list[list[HostLink]] = [[] for _ in hosts]
        dist.all_gather_object(found, mine)
    return tuple(sorted((link for each in found for link in each), key=lambda link: link.hosts))


def rounds(hosts: Sequence[int]) -> Iterator[dict[tuple[int, int], tuple[int, int]]]:
    """Pairs of hosts with the ranks that are timed for them, those together that have no host in common."""
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
    """Send messages there and back; on the rank that leads, bytes and the seconds of one way."""
    begin, found = time.perf_counter(), list[tuple[int, float]]()
    for size in SIZES:
        there, back = torch.zeros(2, size, dtype=torch.uint8, device=device).unbind()
        seconds = []
        for _ in range(1 + _REPEATS):
            since = time.perf_counter()
            for sends in (leads, not leads):
                if sends:
                    dist.send(there, peer)
                else:
                    dist.recv(back, peer)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append((time.perf_counter() - since) / 2)
        # The first one warms up.
        found.append((size, median(seconds[1:])))
        more = torch.tensor([int(time.perf_counter() - begin < _PAIR_S)], device=device)
        if leads:
            dist.send(more, peer)
        else:
            dist.recv(more, peer)
        if not int(more):
            break
    return found
