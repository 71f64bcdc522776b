"""Bandwidth of messages between every two GPUs of this machine, by NCCL.

``python -m benchmarks.gpu_pairs [--dry]``. Each rank has a GPU. Pairs are measured one after the other, while the other
ranks wait. ``--dry`` rehearses with three ranks on the CPU, by gloo.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.gpu import now
from pipeloom.report import markdown_table
from pipeloom.runtime.launch import accelerator
from pipeloom.runtime.launch.device import DeviceType
from pipeloom.runtime.launch.processes import launch

SIZES = (64 << 20, 64 << 10)
REPEATS = 9


def measure(device: DeviceType, sizes: Sequence[int]) -> list[list[float]]:
    """Return seconds of a message there and back, by pair and size; 0 for pairs without this rank."""
    rank, found = dist.get_rank(), []
    for pair in itertools.combinations(range(dist.get_world_size()), 2):
        row = []
        for size in sizes:
            x = torch.zeros(size // 4, device=device)
            dist.barrier()
            if rank in pair:
                row.append(_there_and_back(x, rank == pair[0], sum(pair) - rank, device))
            else:
                row.append(0.0)
        found.append(row)
    return found


def _there_and_back(x: torch.Tensor, first: bool, peer: int, device: DeviceType) -> float:
    times = []
    for _ in range(2 + REPEATS):
        begin = now(device)
        if first:
            dist.send(x, peer)
            dist.recv(x, peer)
        else:
            dist.recv(x, peer)
            dist.send(x, peer)
        times.append(now(device) - begin)
    return statistics.median(times[2:])


def main(given: Sequence[str] | None = None) -> int:
    """Measure all pairs, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_pairs", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="rehearse on the CPU")
    dry = parser.parse_args(given).dry
    device: DeviceType = "cpu" if dry else "cuda"
    num_ranks = 3 if dry else accelerator.count()
    sizes = (1 << 20, 64 << 10) if dry else SIZES
    begin = time.monotonic()
    every = launch(measure, num_ranks, device, sizes, device=device, timeout_s=300.0)
    rows = []
    for number, (one, other) in enumerate(itertools.combinations(range(num_ranks), 2)):
        large, small = every[one][number]
        rows.append([f"{one} - {other}", f"{2 * sizes[0] / large / 1e9:.1f}", f"{small / 2 * 1e6:.0f}"])
    header = ["ranks", f"GB/s, {sizes[0] >> 20} MiB", f"microseconds, {sizes[1] >> 10} KiB"]
    print(f"{num_ranks} ranks, {time.monotonic() - begin:.0f} s\n\n{markdown_table(header, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
