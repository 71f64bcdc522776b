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
LOOP, LINE, VEE = (0, 1, 0, 1), (0, 1), (0, 1, 1, 0)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(4)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


class Problem:
    """Four layers on two ranks, and six microbatches of one shape.

    Parameters
    ----------
    split : bool
        Backwards in two parts.
    ranks : tuple of int
        Rank of each chunk; the layers are dealt out evenly.
    """

    def __init__(self, split: bool, ranks: tuple[int, ...] = LOOP) -> None:
        self.layers, self.ranks = layers(), ranks
        self.samples = [
            (torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, WIDTH).double()) for _ in range(MICROBATCHES)
        ]
        module = Module(
            "lm",
            self.layers,
            reads="sequence",
            hidden=("tokens", WIDTH),
            output=("tokens", WIDTH),
            inputs=lambda part: torch.cat([x for x, _ in part.samples]),
        )
        self.model = Model(
            [module], lambda output, part: loss(output, torch.cat([y for _, y in part.samples])), lambda sample: 1.0
        )
        size = len(self.layers) // len(ranks)
        chunks = tuple(Chunk("lm", (i * size, (i + 1) * size - 1), rank) for i, rank in enumerate(ranks))
        self.layout = Layout(2, (ModuleLayout("lm"),), chunks)
        self.batch = Batch(tuple(Sample(str(i), ROWS) for i in range(MICROBATCHES)))
        self.packing = pack(self.batch, self.model.spec, self.layout, PackingSpec(ROWS))
        self.graph = build_graph(
            self.layout, self.packing, RandomCosts(0, split, ("keep",)), backward="split" if split else "whole"
        )
        run_undivided(self.model, self.batch, self.samples)
        self.wanted = take_gradients(self.model)
        mine = [c for c in chunks if c.rank == dist.get_rank()]
        self.mine = {
            f"lm.{i}.0.{name}"
            for chunk in mine
            for i in range(chunk.layers[0], chunk.layers[1] + 1)
            for name in ("weight", "bias")
        }
        self.stages = [nn.Sequential(*self.layers[c.layers[0] : c.layers[1] + 1]) for c in mine]
        self.stage_numbers = [i for i, c in enumerate(chunks) if c.rank == dist.get_rank()]

    def check(self, scale: float = 1.0) -> None:
        """Compare this rank's gradients with the undivided model's."""
        found = take_gradients(self.model)
        assert_equal_gradients(
            {n: None if found[n] is None else found[n] * scale for n in self.mine},
            {n: self.wanted[n] for n in self.mine},
        )

    def run_ours(self, schedule: Schedule) -> None:
        plan = lower(
            self.graph,
            schedule,
            earliest(self.graph, schedule),
            self.layout,
            self.packing,
            boundary_shapes(self.model.spec, self.layout),
        )
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

    theirs_of = {
        # Not Schedule1F1B: the order that it shows, though not the one that it runs, has wrong microbatch numbers.
        (False, LINE): [pipelining.ScheduleGPipe],
        (False, LOOP): [pipelining.ScheduleInterleaved1F1B, pipelining.ScheduleLoopedBFS],
        (True, LOOP): [pipelining.ScheduleInterleavedZeroBubble],
        (True, VEE): [pipelining.ScheduleZBVZeroBubble, pipelining.ScheduleDualPipeV],
    }
    count = 0
    for (split, ranks), kinds in theirs_of.items():
        problem = Problem(split, ranks)
        stages = [
            pipelining.PipelineStage(layer, number, len(ranks), torch.device("cpu"))
            for layer, number in zip(problem.stages, problem.stage_numbers, strict=True)
        ]
        # PyTorch's runtime takes the place of stages from the schedule's class; from a file it knows loops only.
        for seed in range(3 if ranks == LOOP else 0):
            schedule = in_order(problem.graph, random_schedule(random.Random(seed), problem.graph))
            plan = lower(
                problem.graph,
                schedule,
                earliest(problem.graph, schedule),
                problem.layout,
                problem.packing,
                boundary_shapes(problem.model.spec, problem.layout),
            )
            path = Path(folder) / f"{dist.get_rank()}.csv"
            path.write_text(to_pytorch_csv(plan, problem.layout))
            theirs = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss, scale_grads=False)
            theirs._load_csv(str(path))
            problem.pytorch_step(theirs)
            problem.check(1.0 / MICROBATCHES)
            count += 1
        for kind in kinds:
            made = kind(stages[0] if ranks == LINE else stages, MICROBATCHES, loss_fn=loss)
            rows = [
                ",".join("" if action is None else str(action) for action in made.pipeline_order[rank])
                for rank in (0, 1)
            ]
            problem.run_ours(schedule_from_pytorch_csv("\n".join(rows) + "\n", problem.graph))
            problem.check()
            count += 1
    return count
