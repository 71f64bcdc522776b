"""The digits example with encoders on the first rank, tuned and untuned, for launched ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import pipeloom as pl
from pipeloom.cost import LayerFit, Profile
from pipeloom.layout import ModulePlacement, encoder_first
from pipeloom.packing import PackingSpec
from pipeloom.plan import Answer
from pipeloom.planner import Planner, PlanningProblem
from pipeloom.runtime import ExecutionOptions, TcpPlanStore, Trainer
from pipeloom.tuning import TuningSpec

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits_vlm import data, task

DOCUMENTS, RATE, CLIP = 16, 1e-3, 0.5

SPECS = {
    "untuned": TuningSpec("first_fit", "fixed", "given", "off"),
    "pack": TuningSpec("balanced", "fixed", "given", "off"),
    "micro_batch": TuningSpec("balanced", "any", "given", "off"),
    "order": TuningSpec("first_fit", "fixed", "clusters", "off"),
    "precompute": TuningSpec("first_fit", "fixed", "given", "all"),
    "all": TuningSpec(),
}


def model(frozen: bool, dtype: torch.dtype) -> pl.Model:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        made: pl.Model = task.build_model(seed=1, frozen=frozen)
        return made
    finally:
        torch.set_default_dtype(before)


def invented_problem(num_ranks: int, frozen: bool, tuned: str, dtype: str = "float64") -> PlanningProblem:
    """Costs are invented, with encoder parts that fit into idle times."""
    spec = model(frozen, getattr(torch, dtype)).spec
    profile = Profile(
        "invented",
        {
            f"{m.name}/{layer.kind}": LayerFit(
                (1e-5, 1e-5 if m.name == "vision" else 0, 1e-6, 0),
                (1e-5, 2e-5 * (m.name == "vision"), 2e-6, 0),
                (0, 0, 64, 0),
            )
            for m in spec.modules
            for layer in m.flat_layers
        },
    )
    layout = encoder_first(spec, num_ranks, lambda *_: 1.0, placements={"vision": ModulePlacement(1, 6)})
    return PlanningProblem.from_profile(spec, layout, profile, PackingSpec(100), tuning=SPECS[tuned])


def losses(
    num_ranks: int, iterations: int, frozen: bool, names: tuple[str, ...], dtype: str
) -> dict[str, tuple[list[float], bool]]:
    """Train as one rank, once for every name: losses, and whether encoder work ran ahead of its turn."""
    return {name: _losses(num_ranks, iterations, frozen, name, dtype) for name in names}


def _losses(num_ranks: int, iterations: int, frozen: bool, tuned: str, dtype: str) -> tuple[list[float], bool]:
    given = invented_problem(num_ranks, frozen, tuned, dtype)
    planner = Planner(given, TcpPlanStore.host, deadline_s=20.0)
    trainer = Trainer(
        model(frozen, getattr(torch, dtype)),
        given.layout,
        planner,
        describe=task.describe,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=RATE),
        options=ExecutionOptions(clip_norm=CLIP),
    )
    found, early = [], False
    for report in trainer.run(data.batches(3, iterations, DOCUMENTS)):
        found.append(report.loss)
        if report.answer is not None:
            early = early or _runs_ahead(report.answer)
    return found, early


def _runs_ahead(answer: Answer) -> bool:
    """Whether other work comes between some encoder forward and the backbone's forward that it is for."""
    actions = [a for a in answer.plan.ranks[0] if a.verb.is_compute]
    waiting = -1
    for action in actions:
        encodes = action.verb == "F" and action.chunk.startswith("vision")
        if waiting >= 0 and (action.verb != "F" or action.microbatch != waiting):
            return True
        waiting = action.microbatch if encodes else -1
    return False
