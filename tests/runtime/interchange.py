"""PyTorch's pipelining runtime and ours, each running the other's schedule on two ranks."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import boundary_shapes, lower, schedule_from_pytorch_csv, to_pytorch_csv, verify
from pipeloom.runtime import Executor, Model, Module, TorchTransport, run_undivided
from pipeloom.spec import Batch, Chunk, Layout, ModuleLayout, Sample
from pipeloom.taskgraph import build_graph
from pipeloom.timeline import Schedule
from tests.plan.cases import RandomCosts, earliest, in_order, random_schedule

from .cases import assert_equal_gradients, take_gradients

WIDTH, ROWS, MICROBATCHES = 3, 2, 6


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(4)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


class Problem:
    """Four chunks on two ranks, interleaved, and six microbatches of one shape."""

    def __init__(self, split: bool) -> None:
        self.layers = layers()
        self.samples = [(torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, WIDTH).double())
                        for _ in range(MICROBATCHES)]  # fmt: skip
        module = Module(
            "lm", self.layers, reads="sequence", hidden=("tokens", WIDTH), output=("tokens", WIDTH),
            inputs=lambda part: torch.cat([x for x, _ in part.samples]),
        )  # fmt: skip
        self.model = Model(
            [module],
            lambda output, part: loss(output, torch.cat([y for _, y in part.samples])),
            lambda sample: 1.0,
        )
        self.layout = Layout(2, (ModuleLayout("lm"),), tuple(Chunk("lm", (i, i), i % 2) for i in range(4)))
        self.batch = Batch(tuple(Sample(str(i), ROWS) for i in range(MICROBATCHES)))
        self.packing = pack(self.batch, self.model.spec, self.layout, PackingSpec(ROWS))
        self.graph = build_graph(
            self.layout, self.packing, RandomCosts(0, split, ("keep",)), split_backward=split
        )
        run_undivided(self.model, self.batch, self.samples)
        self.wanted = take_gradients(self.model)
        self.mine = {f"lm.{i}.0.{name}" for i in range(dist.get_rank(), 4, 2) for name in ("weight", "bias")}

    def check(self, scale: float = 1.0) -> None:
        """Compare this rank's gradients with the undivided model's."""
        found = take_gradients(self.model)
        assert_equal_gradients(
            {n: None if found[n] is None else found[n] * scale for n in self.mine},
            {n: self.wanted[n] for n in self.mine},
        )

    def run_ours(self, schedule: Schedule) -> None:
        plan = lower(
            self.graph, schedule, earliest(self.graph, schedule), self.layout, self.packing,
            boundary_shapes(self.model.spec, self.layout),
        )  # fmt: skip
        verify(plan, self.layout, self.packing)
        executor = Executor(self.model, self.layout, dist.get_rank(), TorchTransport(use_tags=False))
        executor.run(plan, self.packing, self.samples)

    def pytorch_step(self, schedule: object) -> None:
        """One step of a PyTorch schedule."""
        inputs, targets = (torch.cat(part) for part in zip(*self.samples, strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if dist.get_rank() == 0:
                schedule.step(inputs)  # type: ignore[attr-defined]
            else:
                schedule.step(target=targets)  # type: ignore[attr-defined]


def exchange(folder: str) -> int:
    """Our plan in PyTorch's runtime, and PyTorch's schedules in ours; returns how many ran."""
    warnings.simplefilter("ignore")
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    count = 0
    for split in (False, True):
        problem = Problem(split)
        stages = [
            pipelining.PipelineStage(problem.layers[i], i, 4, torch.device("cpu"))
            for i in range(dist.get_rank(), 4, 2)
        ]
        for seed in range(3):
            schedule = in_order(problem.graph, random_schedule(random.Random(seed), problem.graph))
            plan = lower(
                problem.graph, schedule, earliest(problem.graph, schedule), problem.layout, problem.packing,
                boundary_shapes(problem.model.spec, problem.layout),
            )  # fmt: skip
            path = Path(folder) / f"{dist.get_rank()}.csv"
            path.write_text(to_pytorch_csv(plan, problem.layout))
            theirs = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss, scale_grads=False)
            theirs._load_csv(str(path))
            problem.pytorch_step(theirs)
            problem.check(1.0 / MICROBATCHES)
            count += 1
        kinds = (
            [pipelining.ScheduleInterleavedZeroBubble]
            if split
            else [pipelining.ScheduleInterleaved1F1B, pipelining.ScheduleLoopedBFS]
        )
        for kind in kinds:
            theirs = kind(stages, MICROBATCHES, loss_fn=loss)
            rows = [
                ",".join("" if action is None else str(action) for action in theirs.pipeline_order[rank])
                for rank in (0, 1)
            ]
            problem.run_ours(schedule_from_pytorch_csv("\n".join(rows) + "\n", problem.graph))
            problem.check()
            count += 1
    return count
