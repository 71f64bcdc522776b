"""An example's task trained for a few iterations over ranks, and in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

import pipeloom as pl
from pipeloom.cost import LayerFit, Profile
from pipeloom.layout import ModulePlacement, separate
from pipeloom.packing import PackingSpec
from pipeloom.planner import Planner, PlanningProblem
from pipeloom.runtime import TcpPlanStore, Trainer, run_undivided
from pipeloom.spec import batch_from_dicts

EXAMPLES = Path(__file__).parents[2] / "examples"
RATE = 1e-3
SIZES = {"moving_digits": {"clips_per_batch": 5}, "moe_mamba_lm": {"texts_per_batch": 6}}
PACKING = {"moving_digits": PackingSpec(200), "moe_mamba_lm": PackingSpec(100)}
PLACEMENTS = {
    "moving_digits": {"text": ModulePlacement(1, 2), "dit": ModulePlacement(2)},
    "moe_mamba_lm": {"lm": ModulePlacement(3)},
}


def task_of(name: str) -> ModuleType:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return import_module(f"{name}.task")


def in_double(name: str) -> pl.Model:
    torch.set_default_dtype(torch.float64)
    try:
        model: pl.Model = task_of(name).build_model(seed=1)
        return model
    finally:
        torch.set_default_dtype(torch.float32)


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def losses_over_ranks(names: list[str], num_ranks: int, iterations: int) -> dict[str, list[tuple[float, float, bool]]]:
    """On one rank: loss, norm of the gradient, and whether the plan was made for the batch, of every iteration."""
    found = {}
    for name in names:
        task, model = task_of(name), in_double(name)
        fit = LayerFit((1e-4, 0, 1e-6, 0), (2e-4, 0, 2e-6, 0), (0, 0, 64, 0))
        profile = Profile("invented", {f"{m.name}/{x.kind}": fit for m in model.spec.modules for x in m.flat_layers})
        layout = separate(model.spec, num_ranks, PLACEMENTS[name], lambda module, layer: 1.0)
        problem = PlanningProblem.from_profile(model.spec, layout, profile, PACKING[name], budget_s=0.02)
        planner = Planner(problem, TcpPlanStore.host, deadline_s=20.0)
        trainer = Trainer(model, layout, planner, describe=task.describe, optimizer=adam)
        found[name] = [
            (report.loss, report.gradient_norm, report.fresh)
            for report in trainer.run(task.batches(iterations, **SIZES[name]))
        ]
    return found


def losses_by_one_process(example: ModuleType, count: int) -> list[float]:
    """Of a script with ``build_model`` and ``batches``, as `pl.fit` would train it."""
    torch.manual_seed(0)
    model = example.build_model()
    optimizer = torch.optim.AdamW([p for m in model.modules for layer in m.layers for p in layer.parameters()])
    losses = []
    for number, samples in zip(range(count), example.batches(), strict=False):
        losses.append(run_undivided(model, pl.batch_of(samples, model.describe, number), samples))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def losses_undivided(name: str, iterations: int) -> list[tuple[float, float]]:
    """The same in one process, without pipeline, packing or planner."""
    task, model = task_of(name), in_double(name)
    parameters = [p for module in model.modules for layer in module.layers for p in layer.parameters()]
    optimizer, found = adam(parameters), []
    describe: Callable[[object], dict[str, object]] = task.describe
    for samples in task.batches(iterations, **SIZES[name]):
        loss = run_undivided(model, batch_from_dicts([describe(sample) for sample in samples]), samples)
        norm = sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None) ** 0.5
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss, norm))
    return found
