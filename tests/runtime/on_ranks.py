"""What the tests run inside launched processes."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import verify
from pipeloom.plan.dryrun import dry_run
from pipeloom.runtime import (
    BatchedTransport,
    Executor,
    HostTransport,
    TorchTransport,
    all_reduce_gradients,
    load_checkpoint,
    report,
    save_checkpoint,
    sums_over_ranks,
)
from pipeloom.runtime.launch.coordination import FirstPlan
from pipeloom.runtime.launch.transport import Handle, Transport
from pipeloom.runtime.model.tied import SumOver
from tests.plan.cases import Case, RandomCosts, assigned_units, earliest, graph_of_units, random_layout, random_schedule

from .cases import Run, assert_equal_gradients, expected, random_run, take_gradients

SUMS = 10**6
"""A tag that no plan has."""


def tensors_of(factor: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Tensors, some of them in a dict; and one as a report."""
    if dist.get_rank() == 0:
        report(torch.full((3,), 7.0))
    return torch.full((2, 2), factor * dist.get_rank()), {"rank": torch.tensor(dist.get_rank())}


def run_many(seeds: list[int], options: dict[str, Any], fewest: int = 1, tag_zero: bool = False) -> dict[str, int]:
    """Run random iterations of ``fewest`` to all ranks, tags and tag 0 by turns; raise for the first that is not exact.

    Some models have layers that share weights; of some iterations the gradients are left for a second run to add to.
    """
    sizes = range(fewest, dist.get_world_size() + 1)
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    counts = {"iterations": 0, "verified": 0, "sent_bytes": 0, "recomputed": 0, "tied": 0}
    for seed in seeds:
        num_ranks = sizes[seed % len(sizes)]
        run = random_run(seed, num_ranks, replicate=seed % 3 == 0, tied=seed % 5 == 0, **options)
        if dist.get_rank() >= num_ranks:
            continue
        sum_tied = sums_in(groups[num_ranks])
        if num_ranks == dist.get_world_size():
            # Only here do all processes come by to make groups.
            sum_tied = sums_over_ranks(run.model, run.case.layout) or sum_tied
        _, wanted = expected(run)
        use_tags = not tag_zero and seed // len(sizes) % 2 == 0
        # With and without joining messages, and by way of the host; the plans for joining are legal for the others too.
        kind = (BatchedTransport, TorchTransport, HostTransport)[seed // len(sizes) % 3]
        transport = kind(groups[num_ranks], use_tags=use_tags)
        if seed < 2 * len(sizes):
            transport.connect("cpu")
        plan = run.case.serial_plan if kind is BatchedTransport else run.case.plan
        if seed % num_ranks == dist.get_rank():
            # Each by one of its ranks, under the rules of NCCL and gloo, and of the transport.
            verify(plan, run.case.layout, run.case.packing, single_communicator=kind is BatchedTransport)
            assert dry_run(plan, "gloo") is None
            counts["verified"] += 1
        executor = Executor(
            run.model,
            run.case.layout,
            dist.get_rank(),
            transport,
            reduce_gradients=all_reduce_gradients(run.case.layout, pipeline=groups[num_ranks]),
            sum_tied=sum_tied,
        )
        times = 2 if seed % 4 == 0 else 1
        for _ in range(times):
            result = executor.run(plan, run.case.packing, run.documents)
        mine = {name for name, _ in executor.named_parameters()}
        found = take_gradients(run.model)
        scaled = {name: None if (g := wanted[name]) is None else times * g for name in mine}
        try:
            assert_equal_gradients({n: found[n] for n in mine}, scaled)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        counts["iterations"] += 1
        counts["sent_bytes"] += result.sent_bytes
        counts["recomputed"] += result.num_recomputed
        counts["tied"] += len(executor.tied)
    return counts


def sums_in(group: Any) -> SumOver:
    """Sums over some ranks of a group without groups of their own: each sends its share to all others."""

    def sum_over(ranks: tuple[int, ...], tensor: torch.Tensor) -> None:
        others = [rank for rank in ranks if rank != dist.get_rank()]
        mine = tensor.clone()
        sent = [dist.isend(mine, rank, group=group, tag=SUMS) for rank in others]
        for rank in others:
            theirs = torch.empty_like(mine)
            dist.recv(theirs, rank, group=group, tag=SUMS)
            tensor += theirs
        for work in sent:
            work.wait()

    return sum_over


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
    Executor(run.model, run.case.layout, dist.get_rank(), transport).run(run.case.plan, run.case.packing, run.documents)


def die_after_the_complaint(seconds: float) -> None:
    """Rank 1 complains of rank 0 before rank 0's end can be seen."""
    dist.barrier()
    if dist.get_rank() == 1:
        raise ConnectionResetError("reset by peer")
    time.sleep(seconds)
    os._exit(7)


def wait_for_a_first_plan(seconds: float) -> bool:
    """Rank 0 takes so long before it has a plan."""
    first = FirstPlan()
    if dist.get_rank() == 0:
        time.sleep(seconds)
    first.wait()
    return True


def relaid(seed: int, num_ranks: int) -> Run:
    """A model and a batch that depend on the seed alone, laid out and planned for so many ranks."""
    first = random_run(seed, 2)
    rng = random.Random(f"{seed} {num_ranks}")
    layout = random_layout(rng, first.case.model, num_ranks)
    packing = pack(first.case.packing.batch, first.case.model, layout, PackingSpec(15 * num_ranks))
    graph = graph_of_units(layout, packing, assigned_units(rng, layout, packing), RandomCosts(seed, False))
    schedule = random_schedule(rng, graph)
    case = Case(first.case.model, layout, packing, graph, schedule, earliest(graph, schedule))
    return Run(case, first.model, first.documents)


def train_save_resume(seed: int, folder: str) -> list[list[float]]:
    """Train on two ranks, save in the middle, resume on one; the losses of both."""
    two, one = dist.new_group([0, 1]), dist.new_group([0])
    losses: list[list[float]] = []
    for group, num_ranks in ((two, 2), (one, 1)):
        dist.barrier()
        if dist.get_rank() >= num_ranks:
            losses.append([])
            continue
        run = relaid(seed, num_ranks)
        executor = Executor(run.model, run.case.layout, dist.get_rank(), TorchTransport(group))
        parameters = executor.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=0.01) if parameters else None
        path = Path(folder) / "step-3"
        first = 0 if num_ranks == 2 else load_checkpoint(path, executor, optimizer, group=group)
        losses.append([])
        for iteration in range(first, 6):
            if num_ranks == 2 and iteration == 3:
                save_checkpoint(path, executor, optimizer, iteration, group=group)
            result = executor.run(run.case.plan, run.case.packing, run.documents)
            losses[-1].append(result.loss_sum / result.normalizer)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    return losses
