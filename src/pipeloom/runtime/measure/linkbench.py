"""Microbenchmarks of the link between two devices of one machine, for `emulator.fit`: messages and collectives.

Two processes are joined by gloo over the loopback device (CPU) or by NCCL (two GPUs). They measure the link inside a
node, which device tables call ``nvlink`` for any kind of link. A link between machines cannot be measured on one. Its
figures stay in the cluster's file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from pipeloom.emulator.fit import Measurement
from pipeloom.runtime.launch import accelerator
from pipeloom.runtime.launch.processes import launch

KINDS = ("send", "all_reduce", "all_gather")
NUM_RANKS = 2
SIZES = tuple(1 << k for k in range(10, 25, 2))
"""Sizes in bytes of messages for the fit: 1 KiB to 16 MiB."""
BETWEEN = tuple(3 << k for k in range(10, 23, 4))
"""Sizes in bytes of messages for the check: 3 KiB to 12 MiB."""
BYTES_AT_ONCE = 1 << 20
MOST_LOOPS = 64


def measure_links(device: Literal["cpu", "cuda"], sizes: Sequence[int] = SIZES, repeats: int = 9) -> list[Measurement]:
    """Time sends, all-reduces and all-gathers between two processes of this machine. ``"cuda"`` needs two GPUs.

    ``sizes`` are the bytes of the sent, reduced or gathered tensor, multiples of 8. The lower eighth of ``3 * repeats``
    wall-clock times counts, because waiting for the other side is part of the measurement. Rounds cover all kinds and
    sizes, so that a disturbance does not affect one alone.

    Returns measurements of part ``nvlink``: for each kind and size, the bytes that each rank sends in a ring, and its
    number of messages. Raises `ExecutionError` if a process fails. Not yet tested on GPUs.
    """
    timed: dict[tuple[str, int], list[float]] = launch(_times, NUM_RANKS, device, tuple(sizes), 3 * repeats)[0]
    out = []
    for (kind, size), times in timed.items():
        passes = 2 if kind == "all_reduce" else 1
        share = 1.0 if kind == "send" else passes * (NUM_RANKS - 1) / NUM_RANKS
        out.append(
            Measurement(
                kind,
                f"{kind} {size} bytes, {NUM_RANKS} ranks",
                sorted(times)[len(times) // 8],
                network_bytes=size * share,
                part="nvlink",
                steps=float(passes * (NUM_RANKS - 1)),
                variant="" if kind == "send" else str(NUM_RANKS),
            )
        )
    return out


def _times(device: str, sizes: tuple[int, ...], repeats: int) -> dict[tuple[str, int], list[float]]:
    """Return seconds of every kind and size, ``repeats`` times, on each rank."""
    group: Any = None
    if accelerator.on_accelerator(device):
        accelerator.select(torch.device(device, dist.get_rank()))
        group = dist.new_group(backend="nccl")
    runs = dict(_runs(device, sizes, group))
    out: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for number in range(repeats + 1):
        for (kind, size), run in runs.items():
            loops = max(1, min(MOST_LOOPS, BYTES_AT_ONCE // size))
            seconds = _seconds(device, group, run, loops) / (2 if kind == "send" else 1)
            if number:  # the first round warms up: connections are made, memory is touched
                out[kind, size].append(seconds)
    return out


def _seconds(device: str, group: Any, run: Callable[[], object], loops: int) -> float:
    """Return wall-clock seconds of one run. Both sides start together."""
    dist.barrier(group)
    accelerator.synchronize(device)
    begin = time.perf_counter()
    for _ in range(loops):
        run()
    accelerator.synchronize(device)
    return (time.perf_counter() - begin) / loops


def _runs(device: str, sizes: tuple[int, ...], group: Any) -> Iterator[tuple[tuple[str, int], Callable[[], object]]]:
    rank = dist.get_rank()
    for size in sizes:
        x = torch.zeros(size // 4, device=device)
        halves = list(x.chunk(NUM_RANKS))
        own = halves[rank].clone()
        yield ("send", size), partial(_there_and_back, x, rank, group)
        yield ("all_reduce", size), partial(dist.all_reduce, x, group=group)
        yield ("all_gather", size), partial(dist.all_gather, halves, own, group=group)


def _there_and_back(x: torch.Tensor, rank: int, group: Any) -> None:
    if rank == 0:
        dist.send(x, 1, group)
        dist.recv(x, 1, group)
    else:
        dist.recv(x, 0, group)
        dist.send(x, 0, group)
