"""What the tests run inside launched processes."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

from pipeloom.runtime import Executor, TorchTransport, all_reduce_gradients
from pipeloom.runtime.transport import Handle, Transport

from .cases import assert_equal_gradients, expected, random_run, take_gradients


def run_many(seeds: list[int], options: dict[str, Any]) -> dict[str, int]:
    """Run random iterations of one to all ranks, tags and tag 0 by turns; raise for the first that is not exact."""
    groups = [dist.new_group(list(range(size))) for size in range(1, dist.get_world_size() + 1)]
    counts = {"iterations": 0, "sent_bytes": 0, "recomputed": 0}
    for seed in seeds:
        num_ranks = seed % len(groups) + 1
        if dist.get_rank() >= num_ranks:
            continue
        run = random_run(seed, num_ranks, replicate=seed % 3 == 0, **options)
        _, wanted = expected(run)
        transport = TorchTransport(groups[num_ranks - 1], use_tags=seed // len(groups) % 2 == 0)
        executor = Executor(
            run.model,
            run.case.layout,
            dist.get_rank(),
            transport,
            reduce_gradients=all_reduce_gradients(run.case.layout, pipeline=groups[num_ranks - 1]),
        )
        result = executor.run(run.case.plan, run.case.packing, run.documents)
        mine = {name for name, _ in executor.named_parameters()}
        found = take_gradients(run.model)
        try:
            assert_equal_gradients({n: found[n] for n in mine}, {n: wanted[n] for n in mine})
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        counts["iterations"] += 1
        counts["sent_bytes"] += result.sent_bytes
        counts["recomputed"] += result.num_recomputed
    return counts


class Hanging:
    """A transport whose rank stops at its first message."""

    def __init__(self, inner: Transport, how: str) -> None:
        self.inner, self.how = inner, how

    def send(self, tensor: Any, peer: int, tag: int) -> Handle:
        if self.how == "sleep":
            time.sleep(1000)
        if self.how == "die":
            os._exit(7)
        raise ValueError("cosmic ray")

    receive = send


def run_with_a_broken_rank(seed: int, how: str) -> None:
    """Rank 0 stops in the middle."""
    run = random_run(seed, 2)
    transport: Transport = TorchTransport()
    if dist.get_rank() == 0:
        transport = Hanging(transport, how)
    Executor(run.model, run.case.layout, dist.get_rank(), transport).run(
        run.case.plan, run.case.packing, run.documents
    )
