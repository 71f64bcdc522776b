"""Train with a pipeline schedule of PyTorch under torch.profiler, and explain the traces.

Usage: python examples/explain_trace.py [--schedule 1f1b] [--ranks 2] [--microbatches 8] [--out runs/traces]
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from pipeloom.cli.app import run
from pipeloom.heartbeat import heartbeat

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""Schedules with one stage per rank."""
MULTI = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}
"""Schedules with several stages per rank."""
STAGES_PER_RANK = 2
WARM_UP = 2


class Block(torch.nn.Module):
    """A residual MLP, whose output has the shape of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, width) to (rows, width)."""
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return out


def stage_of(index: int, blocks: int, width: int) -> torch.nn.Module:
    """Return the blocks of one stage. The first stage has 50% more, so that stages are unequal."""
    torch.manual_seed(index)
    return torch.nn.Sequential(*(Block(width) for _ in range(blocks + (blocks // 2 if index == 0 else 0))))


def train(rank: int, port: int, args: argparse.Namespace) -> None:
    """Run a few iterations on one rank, and write the trace of those after the warm-up."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(args.ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    per_rank = STAGES_PER_RANK if args.schedule in MULTI else 1
    num_stages = per_rank * args.ranks
    modules = [stage_of(i, args.blocks, args.width) for i in range(rank, num_stages, args.ranks)]
    stages = [
        PipelineStage(module, index, num_stages, torch.device("cpu"))
        for index, module in zip(range(rank, num_stages, args.ranks), modules, strict=True)
    ]
    if args.schedule in MULTI:
        pipeline = MULTI[args.schedule](stages, args.microbatches, loss_fn=torch.nn.functional.mse_loss)
    else:
        pipeline = SINGLE[args.schedule](stages[0], args.microbatches, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=1e-3)
    whole = torch.randn(args.rows * args.microbatches, args.width, generator=torch.Generator().manual_seed(0))

    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=WARM_UP, active=args.iterations),
        on_trace_ready=lambda found: found.export_chrome_trace(str(args.out / f"rank{rank}.json.gz")),
        record_shapes=args.shapes,
        with_stack=args.modules,
        profile_memory=args.memory,
    ) as profiler:
        for _ in range(WARM_UP + args.iterations):
            inputs = (whole,) if rank == 0 else ()
            target = whole if rank == args.ranks - 1 else None
            pipeline.step(*inputs, target=target)
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", choices=[*SINGLE, *MULTI], default="1f1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=3, help="recorded iterations, after two for warm-up")
    parser.add_argument("--rows", type=int, default=64, help="rows per microbatch")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4, help="blocks per stage")
    parser.add_argument("--shapes", action="store_true", help="record shapes, for message and microbatch sizes")
    parser.add_argument("--modules", action="store_true", help="record module calls, for the costs of layers")
    parser.add_argument("--memory", action="store_true", help="record memory, for activations and parameters")
    parser.add_argument("--out", type=Path, default=Path("runs/traces"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with heartbeat(f"recording {args.iterations} iterations on {args.ranks} ranks"):
        multiprocessing.spawn(train, args=(port, args), nprocs=args.ranks)
    print(f"wrote {args.ranks} files to {args.out}; running pipeloom explain {args.out}")
    raise SystemExit(run(["explain", str(args.out), "--out", str(args.out.with_suffix(".layers.json"))]))


if __name__ == "__main__":
    main()
